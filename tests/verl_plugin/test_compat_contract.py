"""The private names of verl that tree_rl rests on exist, with the signatures it calls."""

import inspect
from importlib import import_module

import pytest

from tree_rl.verl_plugin import compat

# What our calls and overrides assume of verl, name by name.
PARAMETERS = {
    "FSDPEngineWithLMHead.__init__": ("model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    "FSDPEngineWithLMHead.forward_backward_batch": ("data", "loss_function", "forward_only"),
    "FSDPEngineWithLMHead.forward_step": ("micro_batch", "loss_function", "forward_only"),
    "FSDPEngineWithLMHead._build_module": (),
    "FSDPEngineWithLMHead._build_fsdp_module": ("module",),
    "FSDPEngineWithLMHead._gradient_sync_context": ("is_last_micro_batch",),
    "FSDPEngineWithLMHead.get_data_parallel_group": (),
    "FSDPEngineWithLMHead.get_data_parallel_size": (),
    "EngineRegistry.register": ("model_type", "backend", "device", "vendor"),
    "tensordict_utils.index_select_tensor_dict": ("batch", "indices"),
    "tensordict_utils.assign_non_tensor": ("tensor_dict", "kwargs"),
    "tensordict_utils.get_non_tensor_data": ("data", "key", "default"),
    "get_init_weight_context_manager": ("use_meta_tensor", "mesh"),
    "append_to_dict": ("data", "new_data", "prefix"),
    "detach_tree": ("obj",),
}


@pytest.mark.parametrize("name", compat.PRIVATE_NAMES)
def test_name_exists_where_compat_says(name: str) -> None:
    module = import_module(compat.PRIVATE_NAMES[name])
    resolved = getattr(compat, name)
    assert resolved is getattr(module, name, None) or resolved is import_module(f"{module.__name__}.{name}")


@pytest.mark.parametrize("name", PARAMETERS)
def test_signature_is_the_one_we_call(name: str) -> None:
    first, *rest = name.split(".")
    target = getattr(compat, first)
    for part in rest:
        target = getattr(target, part)
    parameters = [p for p in inspect.signature(target).parameters if p not in ("self", "cls")]
    assert parameters == list(PARAMETERS[name])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        compat.no_such_name  # noqa: B018


def test_the_installed_verl_is_supported() -> None:
    assert compat.check_verl_version() in compat.SUPPORTED_VERL


def test_an_unsupported_verl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda _: "0.8.0")
    with pytest.raises(ImportError, match=r"found verl 0\.8\.0"):
        compat.check_verl_version()
