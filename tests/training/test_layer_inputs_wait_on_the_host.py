"""Layer inputs that wait in host memory change no bit of any gradient; nothing else leaves, and all memory is freed."""

from typing import Any

import pytest
import torch
from measured_models import HIDDEN, KINDS, LAYERS, build, gradients, hostile_rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from tree_rl.cost.memory.model import MemorySaving
from tree_rl.training.memory import host_slab, offloaded_inputs
from tree_rl.training.memory.offloaded_inputs import OffloadedInputs
from tree_rl.tree.forest import Forest

STAY = MemorySaving()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[bool, list[torch.Size]]:
    """Shapes of copies that leave (True) and return (False)."""
    moved: dict[bool, list[torch.Size]] = {True: [], False: []}
    copy = offloaded_inputs._Copy

    def recorded(slab: Any, *, source: torch.Tensor, target: torch.Tensor) -> Any:
        moved[target.untyped_storage().data_ptr() == slab._bytes.untyped_storage().data_ptr()].append(source.shape)
        return copy(slab, source=source, target=target)

    monkeypatch.setattr(offloaded_inputs, "_Copy", recorded)
    return moved


@pytest.mark.parametrize(("kind", "max_tokens"), [(kind, (None, 20)[at % 2]) for at, kind in enumerate(KINDS)])
def test_no_bit_of_a_gradient_changes(kind: str, max_tokens: int | None, copies: dict[bool, list[torch.Size]]) -> None:
    model = build(kind)
    stay = gradients(model, STAY, max_tokens=max_tokens)
    assert not any(copies.values())
    for layers in (1, LAYERS):
        copies |= {True: [], False: []}
        leave = gradients(model, MemorySaving(offloaded_layers=layers), max_tokens=max_tokens)
        assert stay.keys() == leave.keys()
        for name, gradient in stay.items():
            assert torch.equal(gradient, leave[name]), name
        # Every token's input of each of these layers, once, there and back; nothing else.
        unique = Forest.from_rows(hostile_rows()).num_unique
        for moved in copies.values():
            assert sum(shape[1] for shape in moved) == layers * unique
            assert all(shape[0] == 1 and shape[2] == HIDDEN and len(shape) == 3 for shape in moved)


def test_host_memory_is_exact_and_kept() -> None:
    model, slab = build("dense"), host_slab.host_slab(torch.device("cpu"))
    slab.release()
    gradients(model, MemorySaving(offloaded_layers=3))
    unique = Forest.from_rows(hostile_rows()).num_unique
    assert slab.num_bytes == 3 * unique * HIDDEN * 4
    kept = slab._bytes.data_ptr()
    gradients(model, MemorySaving(offloaded_layers=2), max_tokens=20)
    assert slab._bytes.data_ptr() == kept
    gradients(model, MemorySaving(offloaded_layers=LAYERS))
    assert slab.num_bytes == LAYERS * unique * HIDDEN * 4


def test_an_input_leaves_the_device_while_the_next_layer_runs() -> None:
    """The input that a layer reads is alive, and the first one, to which transformers' forward holds on."""
    model, alive, seen = build("dense"), [], []

    def watch(layer: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
        seen.append(torch.multiprocessing.reductions.StorageWeakRef(args[0].untyped_storage()))
        alive.append(sum(not one.expired() for one in seen))

    for layer in model.model.layers:
        layer.register_forward_hook(watch)
    ids = torch.arange(1, 33)[None]
    inputs = OffloadedInputs(model, layers=LAYERS, live_tokens=32)
    with inputs.of_forward():
        logits = model(ids, use_cache=False).logits
    assert alive == [1, 2, 2, 2]
    assert all(one.expired() for one in seen)
    seen.clear()
    logits.sum().backward()


def test_a_forward_between_others_stays() -> None:
    """What runs outside the context, as a dummy of lock-step does, is not offloaded and disturbs nothing."""
    model = build("dense")
    ids = torch.arange(1, 33)[None]
    model(ids, use_cache=False).logits.square().sum().backward()
    expected = [3 * parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    inputs = OffloadedInputs(model, layers=LAYERS, live_tokens=64)
    with inputs.of_forward():
        first = model(ids, use_cache=False).logits.square().sum()
    dummy = model(ids, use_cache=False).logits.square().sum()
    with inputs.of_forward():
        second = model(ids, use_cache=False).logits.square().sum()
    dummy.backward()
    second.backward()
    with inputs.of_forward():
        third = model(ids, use_cache=False).logits.square().sum() * 0
    third.backward()
    first.backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, wanted)


def test_without_checkpoints_it_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="enable_gradient_checkpointing=true"):
        gradients(build("dense", checkpointing=False), MemorySaving(offloaded_layers=1))
    reentrant = build("dense")
    reentrant.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="non-reentrant"):
        OffloadedInputs(reentrant, layers=1, live_tokens=1)


def test_inputs_of_a_run_that_lost_its_memory_are_refused() -> None:
    model, ids = build("dense"), torch.arange(1, 9)[None]
    with OffloadedInputs(model, layers=1, live_tokens=8).of_forward():
        lost = model(ids, use_cache=False).logits.sum()
    with OffloadedInputs(model, layers=1, live_tokens=8).of_forward():
        model(ids, use_cache=False)
    with pytest.raises(RuntimeError, match="another micro-batch"):
        lost.backward()
    host_slab.host_slab(ids.device).release()
    small = OffloadedInputs(model, layers=2, live_tokens=4)
    with pytest.raises(RuntimeError, match="expected at most"), small.of_forward():
        model(ids, use_cache=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_inputs_leave_and_return() -> None:
    """Bitwise the same, and only one of the inputs stays in the device's memory."""
    device, tokens = torch.device("cuda", torch.cuda.current_device()), 4096
    model = build("dense").to(device, torch.bfloat16)
    ids = torch.arange(1, 61, device=device).repeat(tokens)[None, :tokens]
    kept, results = [], []
    with sdpa_kernel(SDPBackend.MATH):
        for layers in (LAYERS, 0, LAYERS):
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with OffloadedInputs(model, layers=layers, live_tokens=tokens).of_forward():
                hidden = model.model(ids, use_cache=False).last_hidden_state
            kept.append(torch.cuda.memory_allocated() - before)
            hidden.float().square().mean().backward()
            results.append([parameter.grad.clone() for parameter in model.model.parameters()])
    slab = host_slab.host_slab(device)
    assert slab.num_bytes >= LAYERS * tokens * HIDDEN * 2
    assert slab._bytes.is_pinned()
    assert kept[1] - kept[2] >= LAYERS * tokens * HIDDEN * 2
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            assert torch.equal(got, expected)
    slab.release()
    assert slab.num_bytes == 0
