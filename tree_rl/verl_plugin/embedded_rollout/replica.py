"""`rollout.name=hf` in verl: starts the servers and sends them the trainer's weights."""

import asyncio
import os
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed.device_mesh import DeviceMesh
from verl.plugin.platform import get_platform
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from tree_rl.verl_plugin.embedded_rollout.hf_options import HFRolloutOptions
from tree_rl.verl_plugin.embedded_rollout.server import HFServer
from tree_rl.verl_plugin.embedded_rollout.weight_buckets import pack


class HFReplica(RolloutReplica):
    """One server process per trainer rank (or per standalone rollout worker), on the node of that rank."""

    async def launch_servers(self) -> None:
        """Start the server next to its worker and wait until its model is built."""
        # Refuse wrong keys before a process starts.
        HFRolloutOptions.from_rollout(self.config)
        worker = self.workers[0]
        node_id, accelerator_ids = await worker.__ray_call__.remote(_where)
        env_vars = {**dict.fromkeys(get_platform().ray_noset_envvars(), "1"), "OMP_WAIT_POLICY": "PASSIVE"}
        if get_platform().device_name != "cpu":
            env_vars[get_platform().visible_devices_envvar()] = ",".join(accelerator_ids)
        server_class = ray.remote(num_cpus=0)(HFServer)
        server = server_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            runtime_env={"env_vars": env_vars},
            name=self._server_name(),
            max_concurrency=self.max_concurrency,
        ).remote(
            self.config,
            self.model_config,
            replica_rank=self.replica_rank,
            num_threads=max(1, (os.cpu_count() or 1) // max(1, self.gpus_per_node)),
            weights_follow=self.rollout_mode == RolloutMode.HYBRID and "dummy" in self.config.load_format,
        )
        await server.__ray_ready__.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = self._server_name()

    def _server_name(self) -> str:
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        return f"{server_name(self.replica_rank, kind)}{self.name_suffix}"


class HFServerAdapter(BaseRollout):
    """The trainer's side of a server: all ranks gather the weights, and each sends them to its own server.

    All arguments are verl's; `replica_rank=-1` means the worker's rank.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh | None,
        replica_rank: int = -1,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    @property
    def _server(self) -> Any:
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_kwargs: Any,
    ) -> None:
        """Send (Hugging Face name, full tensor) pairs, possibly asynchronous, in buckets through shared memory.

        The server reports `global_steps` with every generation. Raises a NotImplementedError if the weights are only an
        adapter's, or deltas.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"wire_format={wire_format!r}: rollout.name=hf takes full weights; choose another "
                "rollout.checkpoint_engine.backend than delta_sharded"
            )
        if peft_config is not None:
            raise NotImplementedError(
                "rollout.name=hf holds no separate LoRA adapter; set actor_rollout_ref.model.lora.merge=True"
            )
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        gathered = weights
        if hasattr(weights, "__aiter__"):  # from a checkpoint engine
            gathered = [(name, tensor.clone()) async for name, tensor in weights]
        server = self._server
        await asyncio.gather(*[server.load_weights.remote(bucket) for bucket in pack(gathered, bucket_bytes)])
        await server.finish_weights.remote(global_steps)


def server_name(replica_rank: int, kind: str = "") -> str:
    """Return the Ray actor name under which the trainer finds its server."""
    return f"hf_server_{kind}{replica_rank}_0"


def _where(_worker: Any) -> tuple[str, list[str]]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_platform().ray_resource_name()]
