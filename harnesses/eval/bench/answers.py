"""Whether HEAR changed what a model answers: temperature 0, the same prompts, every arm.

Knows answers by the names of their requests, and nothing of engines.
"""

from collections.abc import Mapping

from hear.interfaces import InferenceResult

Answers = Mapping[str, InferenceResult]
"""By request."""


def differences(answers: Answers, reference: Answers) -> list[str]:
    """How the answers of an arm differ from those of the one that it is compared with, in words.

    Only requests that were answered in both are compared, token for token where the engine tells
    the ids, else by their text; what was not answered is told of elsewhere.
    """
    found: list[str] = []
    for request, result in answers.items():
        other = reference.get(request)
        if other is None or "completed" not in {result.outcome.status} & {other.outcome.status}:
            continue
        if result.token_ids and other.token_ids:
            if tuple(result.token_ids) != tuple(other.token_ids):
                pairs = zip(result.token_ids, other.token_ids, strict=False)
                place = next(
                    (n for n, (a, b) in enumerate(pairs, 1) if a != b),
                    min(len(result.token_ids), len(other.token_ids)) + 1,
                )
                found.append(f"{request} from token {place} on")
        elif result.text != other.text:
            found.append(f"{request} in its text")
    return found


def num_told(answers: Answers) -> int:
    """How many answers there are to compare: those of which the engine told the words."""
    return sum(1 for result in answers.values() if result.token_ids or result.text)
