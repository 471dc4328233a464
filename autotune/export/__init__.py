"""How one setting leaves the tuner: files for vLLM with our scheduler, for patched servers, for containers, and as JSON.

    vllm.yaml            for `vllm serve --config`: scheduler class, settings, and the measured server's flags
    ppas.env             the same for our plugin, by environment alone
    vllm-0.22.1.env      for the published patch of that vLLM: the setting, or the nearest that it can express
    vllm-0.27.1.env      likewise
    settings.json        the settings with their provenance
    compose.yaml, Dockerfile, kubernetes.yaml, helm-values.yaml      the same server in a container; see `deploy`
    vllm-sweep.json, auto_tune.txt     the shapes of vLLM's own tuning tools; see `vllm_bench`
    README.md            what each of them is, and the command for it

Each of the first five carries a digest of its settings; `load_export` gives them back and refuses what was changed by
hand. Results as tables are in `tables`.
"""

from autotune.export.common import SCHEDULER_CLASS, settings_digest
from autotune.export.config_file import vllm_config_text, words_beside
from autotune.export.index import serve_lines
from autotune.export.patches import GENERATIONS, Generation, environment, nearest_expressible, server_flags
from autotune.export.read import load_export
from autotune.export.write import Cost, write_export, write_vllm_config

__all__ = [
    "GENERATIONS",
    "SCHEDULER_CLASS",
    "Cost",
    "Generation",
    "environment",
    "load_export",
    "nearest_expressible",
    "serve_lines",
    "server_flags",
    "settings_digest",
    "vllm_config_text",
    "words_beside",
    "write_export",
    "write_vllm_config",
]
