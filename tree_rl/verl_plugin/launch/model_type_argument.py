"""Lets `actor_rollout_ref.model.model_type=tree_language_model` on verl's command line do what it says."""

MODEL_TYPE_KEYS = ("actor_rollout_ref.model.model_type", "critic.model.model_type", "model.model_type")


def accept_model_type(arguments: list[str]) -> None:
    """Put `++` before `...model.model_type=tree...` in `sys.argv`, in place; every other argument stays."""
    # `model_type` is a field of verl's HFModelConfig that verl's yaml lacks, and Hydra accepts such a key only as
    # `++key=value`. verl offers no hook between loading its plugins and Hydra's reading of sys.argv, so the plugin
    # edits sys.argv while it loads. tests/verl_plugin/test_trainer_drop_in.py guards this.
    for index, argument in enumerate(arguments):
        key, _, value = argument.partition("=")
        if key in MODEL_TYPE_KEYS and value.startswith("tree"):
            arguments[index] = f"++{argument}"
