"""What every engine of ours knows of KV blocks: leases, retention, eviction, shared prefixes."""
