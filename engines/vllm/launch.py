from typing import Any


def tier_config(num_bytes: int) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TierSpec",
            "spec_module_path": "hear.engines.vllm.tier",
            "cpu_bytes_to_use": num_bytes,
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
        },
    }
