"""A head that answers with edge log-probs gives what the model's own logits give, and nothing of it leaks."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense_models import FAMILIES, SIZES, build, some_rows
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CohereConfig, GPTNeoXConfig, GraniteConfig, OPTConfig, PretrainedConfig

from tree_kernels.edge_log_probs import EdgeValues
from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.models.edge_head import EdgeHead, edge_values
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.loss.edges import plan_edges, tree_log_probs, wanted_everywhere
from tree_rl.tree.forest import Forest

SCALED: dict[str, PretrainedConfig] = {
    "cohere_scale": CohereConfig(**SIZES, logit_scale=0.25),
    "granite_scale": GraniteConfig(**SIZES, logits_scaling=3.0),
    "granite_scale_of_one": GraniteConfig(**SIZES),
    "opt_contiguous": OPTConfig(**SIZES, ffn_dim=40, word_embed_proj_dim=32, dropout=0.0, enable_bias=False),
    "gpt_neox": GPTNeoXConfig(**{name: value for name, value in SIZES.items() if name != "head_dim"}),
}
ALL = {**FAMILIES, **SCALED}
QWEN3 = FAMILIES["qwen3"]


FOREST = Forest.from_rows(some_rows())
TEMPERATURE_B = np.array([1.0, 0.5, 1.0, 2.0, 1.0, 0.5], dtype=np.float32)
EDGES = plan_edges(FOREST, wanted_everywhere(FOREST), TEMPERATURE_B)


def on_trees(config: PretrainedConfig, *, head_answers: bool = True) -> Any:
    model = build(config)
    use_tree_attention(model)
    assert not head_answers or use_edge_head(model) is None
    return model


def evaluate(model: Any, *, late: bool = False) -> list[torch.Tensor | None]:
    """Outputs of all edges, then the gradients of a loss that weighs each differently. Unless `late`, edges are planned
    before the layers, because the head is out of sight."""
    reader = model if late else lambda **kwargs: model(**kwargs)
    extras = ("entropy", "sum_pi_squared")
    flat = tree_log_probs(reader, TreeInputs.from_forest(FOREST), lambda: EDGES, extras=extras)
    weight_F = torch.linspace(-1.0, 2.0, FOREST.num_flat, dtype=torch.float64)
    loss = (flat["log_probs"] * weight_F).sum() + (flat["entropy"] * weight_F.flip(0)).sum()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [flat["log_probs"], flat["entropy"], flat["sum_pi_squared"], *gradients]


def assert_same(got: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            scale = float(other.detach().norm()) + 1e-9
            assert float((one - other).detach().norm()) < 1e-10 * scale


@pytest.mark.parametrize("family", ALL)
def test_every_family_gives_what_its_logits_give(family: str) -> None:
    model = on_trees(ALL[family], head_answers=False)
    expected = evaluate(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert use_edge_head(model) is None
    assert use_edge_head(model) is None
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    answers: list[Any] = []
    model.get_output_embeddings().register_forward_hook(lambda head, args, answer: answers.append(answer))
    assert_same(evaluate(model), expected)
    assert [isinstance(answer, tuple) for answer in answers] == [True], "the head answered with values, not with logits"


@pytest.mark.parametrize("casts", (False, True))
def test_a_bias_and_a_cast_of_the_logits_are_understood(casts: bool) -> None:
    model = build(FAMILIES["llama"])
    model.lm_head = nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], bias=not casts).double()
    use_tree_attention(model)
    expected = evaluate(model)
    assert use_edge_head(with_forward(model, lambda logits: logits.float()) if casts else model) is None
    assert_same(evaluate(model), expected)


@pytest.mark.parametrize(("family", "head_answers"), [("qwen3", True), ("granite_scale", True), ("gpt_neox", False)])
def test_edges_planned_late_give_the_same(family: str, head_answers: bool) -> None:
    model = on_trees(ALL[family], head_answers=head_answers)
    assert_same(evaluate(model, late=True), evaluate(model))
    lora = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    assert_same(evaluate(lora, late=True), evaluate(lora))


@pytest.mark.parametrize("head_answers", [True, False])
def test_late_edges_are_planned_behind_the_layers_where_the_head_answers(head_answers: bool) -> None:
    model = on_trees(QWEN3, head_answers=head_answers)
    order: list[str] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: order.append("layer"))
    tree_log_probs(model, TreeInputs.from_forest(FOREST), lambda: order.append("plan") or EDGES)
    layers = ["layer"] * len(model.model.layers)
    assert order == ([*layers, "plan"] if head_answers else ["plan", *layers])


def test_only_the_thread_and_the_call_that_ask_are_answered() -> None:
    model = on_trees(QWEN3)
    ids = torch.arange(5)[None]
    shape = (1, 5, SIZES["vocab_size"])
    seen = []

    def asks(**kwargs: Any) -> Any:
        # In the middle of a request another thread uses the same model.
        other = threading.Thread(target=lambda: seen.append(model(input_ids=ids).logits.shape))
        other.start()
        other.join()
        return model(**kwargs)

    values = edge_values(asks, TreeInputs.from_forest(FOREST).model_kwargs(), lambda: EDGES.request)
    assert isinstance(values, EdgeValues)
    assert model(input_ids=ids).logits.shape == shape and seen == [shape]

    with pytest.raises(ArithmeticError):
        edge_values(lambda **_: 1 / 0, {}, lambda: EDGES.request)
    assert model(input_ids=ids).logits.shape == shape


def test_whatever_works_on_the_answer_is_noticed() -> None:
    kwargs = TreeInputs.from_forest(FOREST).model_kwargs()
    for family, change, error in (
        ("qwen3", lambda answer: answer[0] * 2, RuntimeError),
        ("qwen3", lambda answer: answer[:, -1:], TypeError),
        ("qwen3", lambda answer: answer.float(), AttributeError),
        ("granite_scale", torch.exp, TypeError),
    ):
        model = on_trees(ALL[family])
        model.lm_head.register_forward_hook(lambda module, inputs, output, change=change: change(output))
        with pytest.raises(error):
            edge_values(model, kwargs, lambda: EDGES.request)


def with_forward(model: Any, change: Any) -> Any:
    """The model with logits changed behind the head."""
    forward = model.forward
    model.forward = lambda **kwargs: SimpleNamespace(logits=change(forward(**kwargs).logits))
    return model


def ignoring_logits_to_keep(model: Any) -> Any:
    forward = model.forward
    model.forward = lambda logits_to_keep=None, **kwargs: forward(**kwargs)
    return model


def with_lora_on_the_head(model: Any) -> Any:
    get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    return model


class OtherLinear(nn.Linear):
    """As quantised layers are."""


def with_another_head(model: Any) -> Any:
    model.lm_head.__class__ = OtherLinear
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: with_forward(model, lambda logits: logits - 1), "by more than a factor or a soft cap"),
        (lambda model: with_forward(model, lambda logits: 3 * torch.tanh(logits / 3)), "by more than a factor"),
        (lambda model: with_forward(model, lambda logits: logits.half()), "converts the head's output"),
        (lambda model: with_forward(model, lambda logits: logits[..., :-1]), "changes the shape"),
        (lambda model: with_forward(model, lambda logits: logits.no_such_thing), "could not be probed"),
        (ignoring_logits_to_keep, "where one token was asked for"),
        (with_another_head, "OtherLinear"),
        (with_lora_on_the_head, "not a plain"),
    ],
)
def test_a_model_that_is_not_understood_keeps_its_logits(change: Any, reason: str) -> None:
    model = change(build(FAMILIES["llama"]))
    answer = use_edge_head(model)
    assert answer is not None and reason in answer
    assert not any(isinstance(module, EdgeHead) for module in model.modules())
    assert "forward" not in vars(model.base_model) and "forward" not in vars(model.get_output_embeddings())


def test_a_head_whose_forward_was_replaced_answers_by_logits_or_not_at_all() -> None:
    def replace_forward(model: Any) -> Any:
        """As hooks of accelerate do."""
        forward = model.lm_head.forward
        model.lm_head.forward = lambda hidden: forward(hidden)
        return model

    model = build(FAMILIES["llama"])
    use_tree_attention(model)
    expected = evaluate(model)
    assert "replaced its head's forward" in str(use_edge_head(replace_forward(model)))
    assert_same(evaluate(model), expected)
    prepared = on_trees(FAMILIES["llama"])
    # The head's own forward, bound, answers.
    assert_same(evaluate(replace_forward(prepared)), evaluate(on_trees(FAMILIES["llama"])))
    prepared.lm_head.forward = lambda hidden: nn.functional.linear(hidden, prepared.lm_head.weight)
    with pytest.raises(RuntimeError, match="replaced its forward after use_edge_head"):
        evaluate(prepared, late=True)


def test_lora_on_the_head_trains_through_its_logits() -> None:
    model = with_lora_on_the_head(build(FAMILIES["llama"])).train()
    use_tree_attention(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    expected = evaluate(model)
    assert use_edge_head(model) is not None
    assert_same(evaluate(model), expected)


def test_the_probe_touches_no_weight_and_puts_everything_back() -> None:
    with torch.device("meta"):
        model = build(QWEN3)
    assert use_edge_head(model) is None
    assert "forward" not in vars(model.base_model) and "forward" not in vars(model.lm_head)
    assert model.lm_head.weight.device.type == "meta"
