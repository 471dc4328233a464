"""A wrapper that serves in vLLM's place: takes the command that would start vLLM, and acts on its flags and variables.

`server.wrapper: [python, stand_in_vllm.py, BEHAVIOUR.json]` in a study file. The real launcher, guard, life cycle and
study run; only what would take minutes to start is stood in for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import openai_server
from stand_in_engine import EngineOptions

from search_spaces.yaml_file import read_yaml


def main() -> None:
    behaviour: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    flags = dict(zip(sys.argv[2:], sys.argv[3:], strict=False))
    export = read_yaml(Path(flags["--config"])) if "--config" in flags else {}
    budget = int(export.get("max-num-batched-tokens") or flags["--max-num-batched-tokens"])
    max_num_seqs = int(export.get("max-num-seqs") or flags["--max-num-seqs"])
    settings_file = os.environ.get("PPAS_SETTINGS_FILE")
    engine = EngineOptions(
        settings_file=settings_file or f"{os.environ['PPAS_STEP_LOG']}.none",
        step_log=os.environ["PPAS_STEP_LOG"],
        budget=budget,
        max_num_seqs=max_num_seqs,
        params=export.get("additional-config", {}).get("ppas"),
    )
    print(f"Chunked prefill is enabled with max_num_batched_tokens={budget}.")
    print("P-PAS settings: as asked (from environment); SyncPpasScheduler", flush=True)
    wanted = openai_server.Behaviour(**{**behaviour, "port": int(flags["--port"]), "engine": engine.__dict__})
    asyncio.run(openai_server.Server(wanted).serve())


if __name__ == "__main__":
    main()
