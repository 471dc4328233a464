"""Whether what a user gives as model can only be a folder, or may be a name that vLLM finds itself."""


def is_path_alone(model: str) -> bool:
    """Whether `model` is a path, and no name as model hubs have them (`org/name`), no URL, and no file within a hub's."""
    if "://" in model or model.endswith(".gguf"):
        return False
    return model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
