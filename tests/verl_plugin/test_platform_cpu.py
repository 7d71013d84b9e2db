"""On a machine without an accelerator verl runs as it is: platform, process group, stock training worker."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tree_rl.verl_plugin.cpu import platform_cpu

without_accelerator = pytest.mark.skipif(
    platform_cpu.torch_has_accelerator(),
    reason="this torch build drives an accelerator; VERL_PLATFORM=cpu would be needed",
)


def run_python(code: str, **env: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_another_choice_of_platform_is_respected() -> None:
    out = run_python(
        "import verl; from verl.plugin.platform import get_platform; print(type(get_platform()).__name__)",
        VERL_PLATFORM="nvidia",
    )
    assert out.split()[-1] == "PlatformCUDA"


def test_a_cuda_build_without_a_device_is_left_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not platform_cpu.PlatformCPU().is_platform_available(use_smi_check=True)


@without_accelerator
def test_verl_finds_the_platform_by_itself() -> None:
    run_python(
        """
        import verl
        from verl.plugin.platform import get_platform
        from verl.utils.device import get_device_id, get_device_name, get_torch_device
        assert type(get_platform()).__name__ == "PlatformCPU", get_platform()
        assert (get_device_name(), str(get_device_id()), get_torch_device().is_available()) == ("cpu", "cpu", False)
        """
    )


@pytest.mark.slow
@without_accelerator
def test_verls_stock_training_worker_starts_its_process_group(tmp_path: object) -> None:
    """verl asks torch for "cpu:gloo,cpu:gloo"; FSDP2, a clipped step and weight export run on that group."""
    out = run_python(
        f"""
        import os, socket, sys, verl
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
        from pathlib import Path
        import torch, toy_qwen
        from functools import partial
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
        from verl.trainer.config import CheckpointConfig
        from verl.workers.utils.losses import sft_loss

        path = toy_qwen.save_model(Path({str(tmp_path)!r}))
        precision = dict(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
        config = TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=path, use_remove_padding=True,
                                       override_config=dict(attn_implementation="sdpa")),
            engine_config=FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=precision,
                                           use_torch_compile=False, use_dynamic_bsz=True, max_token_len_per_gpu=512,
                                           infer_max_token_len_per_gpu=512),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=3),
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
        worker = TrainingWorker(config)
        print("backend", torch.distributed.get_backend())
        worker.reset()
        worker.set_loss_fn(partial(sft_loss, config=None))
        ids = [torch.randint(9, 200, (n,)) for n in (12, 7)]
        nested = lambda xs: torch.nested.as_nested_tensor(xs, layout=torch.jagged)
        data = TensorDict(dict(input_ids=nested(ids), position_ids=nested([torch.arange(len(i)) for i in ids]),
                               loss_mask=nested([torch.ones(len(i), dtype=torch.int64) for i in ids])), batch_size=2)
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=512, use_fused_kernels=False,
                             global_batch_size=2, temperature=1.0, global_token_num=[12, 7], update_lr_scheduler=True)
        losses = []
        for _ in range(3):
            output = worker.train_batch(data)
            losses.append(float(tu.get(output, "metrics")["loss"]))
        assert losses[-1] < losses[0], losses
        tensors, _ = worker.engine.get_per_tensor_param()
        assert len(dict(tensors)) > 10
        print("ok")
        """
    )
    assert "backend cpu:gloo,cpu:gloo" in out and out.split()[-1] == "ok"
