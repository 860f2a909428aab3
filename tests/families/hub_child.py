"""Opens bases in a process of its own, since huggingface_hub reads its environment when it is imported.

A line of standard input is a question, {"base": …, "load": [components]}; a line of standard output its answer.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    import torch
    import transformers  # noqa: F401

    from engine.errors import BaseModelError
    from engine.families.loading import load
    from engine.families.registry import open_base
    from engine.settings.schema import Base

    for line in sys.stdin:
        question = json.loads(line)
        start = time.monotonic()
        try:
            family, located = open_base(Base(**question["base"]))
            answer: dict[str, Any] = {"family": family.spec.id, "path": str(located.path), "commit": located.commit}
            answer["configuration"] = str(located.configuration)
            answer["notes"] = located.notes
            answer["seconds"] = time.monotonic() - start
            if question.get("load"):
                parts = load(family, located, question["load"], dtype=torch.float32)
                answer["sums"] = {
                    name: sum(float(p.double().sum()) for p in parts[name].parameters())
                    for name in question["load"]
                    if isinstance(parts[name], torch.nn.Module)
                }
                answer["identity"] = located.identity(question["load"])
        except BaseModelError as error:
            answer = {"error": error.message, "hint": error.hint, "seconds": time.monotonic() - start}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
