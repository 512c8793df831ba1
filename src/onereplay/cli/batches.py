"""What a plan says in a table and in JSON."""

from typing import Any

from onereplay.core.plan import Eager, Plan, Replay


def steps_json(steps: Plan) -> dict[str, dict[str, Any]]:
    """What each path does: a replayed budget with its padding, or why it runs eagerly."""
    return {path: _step_json(steps, path) for path in steps.steps}


def _step_json(steps: Plan, path: str) -> dict[str, Any]:
    match steps.steps[path]:
        case Replay(capacity):
            return {"budget": capacity.tokens, "padding": capacity.tokens - steps.demands[path].tokens}
        case Eager(reason, detail):
            return {"eager": reason.value, "detail": detail}


def steps_text(steps: Plan, *, details: bool = False) -> str:
    """The same in words, with the path's name where there are several; `details` say by how much it is too large."""
    texts = {path: _step_text(step, details) for path, step in steps.steps.items()}
    return "; ".join(f"{path}: {text}" if len(texts) > 1 else text for path, text in texts.items())


def _step_text(step: Replay | Eager, details: bool) -> str:
    match step:
        case Replay(capacity):
            return f"replay {capacity.tokens:,}"
        case Eager(reason, detail):
            return f"eager, {reason.value}{f' ({detail})' if details and detail else ''}"


def padding_of(steps: Plan) -> tuple[int, int]:
    """Padding tokens and all tokens of a plan's replays."""
    replayed = [
        (step.capacity.tokens, steps.demands[path].tokens)
        for path, step in steps.steps.items()
        if isinstance(step, Replay)
    ]
    return sum(rows - tokens for rows, tokens in replayed), sum(rows for rows, _ in replayed)
