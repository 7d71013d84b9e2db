"""One line added to a verl command turns a run into a tree run; `test_hf_rollout_ray` runs one."""

from tree_rl.verl_plugin.launch.tree_arguments import accept_model_type


def test_only_our_model_types_are_touched() -> None:
    line = ["main_ppo", "actor_rollout_ref.model.model_type=tree_language_model", "critic.model.model_type=value_model"]
    line += ["+critic.model.model_type=tree_value_model", "data.train_batch_size=8", "--cfg"]
    received = list(line)
    accept_model_type(received)
    assert received == [line[0], f"++{line[1]}", *line[2:]]
