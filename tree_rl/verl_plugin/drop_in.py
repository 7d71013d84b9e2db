"""The one-line drop-in as it is written: verl's yaml lacks `model_type`, a field of its own HFModelConfig.

Hydra overrides a missing key only as `++key=value`, so the plugin adds the two signs before Hydra reads them.
"""

MODEL_TYPE_KEYS = ("actor_rollout_ref.model.model_type=", "critic.model.model_type=", "model.model_type=")


def accept_model_type(arguments: list[str]) -> None:
    """Let `...model.model_type=tree_...` through Hydra's check of keys; in place, every other argument as it is.

    Args:
        arguments: the command line, `sys.argv`.
    """
    for index, argument in enumerate(arguments):
        key, _, value = argument.partition("=")
        if f"{key}=" in MODEL_TYPE_KEYS and value.startswith("tree_"):
            arguments[index] = f"++{argument}"
