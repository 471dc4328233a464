"""How one setting leaves the tuner: files for vLLM with our scheduler, for the published patched servers, and as JSON.

    vllm.yaml            for `vllm serve --config`, with the scheduler class and the settings
    ppas.env             the same for our plugin, by environment alone
    vllm-0.22.1.env      for the published patch of that vLLM: the setting, or the nearest that it can express
    vllm-0.27.1.env      likewise
    settings.json        the settings with their provenance

Every file carries a digest of its settings; `load_export` gives them back and refuses what was changed by hand.
"""

from autotune.export.common import SCHEDULER_CLASS, settings_digest
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
    "server_flags",
    "settings_digest",
    "write_export",
    "write_vllm_config",
]
