"""Conditions of the table of refusals that look at this machine: its files, packages, devices and environments.

The launcher asks them only for a job whose processes all run here.
"""

import ast
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from hydra.errors import HydraException
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from verl.checkpoint_engine import CheckpointEngineRegistry

from tree_kernels.tree_attention import IMPLEMENTATIONS, unavailable_reason
from tree_kernels.tree_attention.fa4.autograd import package_reason
from tree_rl.tree.report.counted import counted
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.did_you_mean import did_you_mean
from tree_rl.verl_plugin.refusals.conditions import ROLLOUT, Condition, Words, texts
from tree_rl.verl_plugin.refusals.refusal import option
from tree_rl.verl_plugin.refusals.separate_rollouts import num_rollout_gpus

ENGINE_PACKAGES = {
    "vllm": ("vllm", "pip install 'tree_rl[vllm]'"),
    "sglang": ("sglang", "pip install 'verl[sglang]'"),
    "trtllm": ("tensorrt_llm", "pip install tensorrt_llm"),
}
"""Module and installation of each rollout engine that is a package of its own."""
LOGGER_MODULES = {
    **{name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")},
    "vemlp_wandb": "volcengine_ml_platform",
}
WANDB_ACCOUNT = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_DISABLED")
"""Variables that let wandb start without its file of accounts."""
TOKENIZER = {"tokenizer (tokenizer.json)": ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")}
TOKENIZER_JSON = ("tokenizer.json", "tokenizer_config.json")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
ROW_FILES = (".parquet", ".json", ".jsonl")
"""Endings that verl's data set reads."""
LOOP = "agent_name"
"""Column in which a prompt names its agent loop."""
OWN_DATA_SET = "data.custom_cls.path"
"""Key of a data set that may read anything."""
PACKAGE = "pkg://"
"""Prefix of a module by its name, where verl takes the path of a file too."""
VALUE_HEAD = "AutoModelForCausalLMWithValueHead"
"""Class that verl imports from TRL wherever TRL is installed; TRL 1.16 no longer has it."""
CPUS_OF_A_PROCESS = 3
"""Processors that verl asks Ray for with each GPU."""


# Packages and devices.


def absent_engine(name: Any, _: Any) -> Words | None:
    """A rollout engine whose package is not installed."""
    module, command = ENGINE_PACKAGES.get(name, (None, ""))
    return None if module is None or find_spec(module) else {"module": module, "command": command}


def trl_without_value_head(*_: Any) -> Words | None:
    """A TRL beside which verl can build no model; found without importing it, which takes seconds."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin)
    has_it = (source.parent / "experimental" / "ppo").is_dir() or VALUE_HEAD in source.read_text()
    return None if has_it else {"trl": source.parent}


def unready_logger(loggers: Any, _: Any) -> Words | None:
    """A logger whose package is not installed, or wandb without an account, which it would ask for after loading."""
    for name in texts(loggers):
        module = LOGGER_MODULES.get(name)
        if module is not None and find_spec(module) is None:
            return {"value": name, "reason": f"{module} is not installed here", "remedy": f"pip install {module}"}
        if name == "wandb" and not any(map(os.environ.get, WANDB_ACCOUNT)) and not any(map(Path.exists, _netrc())):
            return {"value": name, "reason": "this machine is not logged in", "remedy": "wandb login"}
    return None


def _netrc() -> Iterator[Path]:
    yield from (Path(name).expanduser() for name in (os.environ.get("NETRC", "~/.netrc"), "~/_netrc"))


def absent_backend(name: Any, config: Any) -> Words | None:
    """A way to send weights whose package is not installed; a module of the user's may add others."""
    known = sorted(CheckpointEngineRegistry._registry)
    is_known = name in known or option(config, f"{ROLLOUT}.checkpoint_engine.custom_backend_module")
    return None if is_known else {"known": ", ".join(known)}


def no_optimizer(options: Any, _: Any) -> Words | None:
    """Options of which verl's workers could build no optimizer; tried on one weight."""
    try:
        compat.build_optimizer([torch.nn.Parameter(torch.zeros(1))], compat.omega_conf_to_dataclass(options))
    except HydraException:  # `validate_config` names the key
        return None
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        # One of them lists a whole module.
        return {"reason": str(error).partition(". ")[0]}
    return None


def too_few_gpus(asked: Any, config: Any) -> Words | None:
    """More GPUs than this machine shows, or than Ray is told of; separate rollouts have their own."""
    told, others = option(config, "ray_kwargs.ray_init.num_gpus"), num_rollout_gpus(config)
    more = f" and {ROLLOUT}.n_gpus_per_node={others}" if others else ""
    if told is not None and asked + others > told:
        return {"more": more, "found": f"ray_kwargs.ray_init.num_gpus={told}"}
    if option(config, "trainer.device") != "cuda" or (told is not None and compat.get_device_name() == "cpu"):
        return None
    found = torch.cuda.device_count()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden})"
    shows = f"this machine shows {counted(found, 'GPU') if found else 'no GPU'}{named}"
    return {"more": more, "found": shows} if asked + others > found else None


def cpu_on_another_platform(asked: Any, _config: Any) -> Words | None:
    """A job on the CPU where verl's detection chose an accelerator, by torch's build or by VERL_PLATFORM."""
    platform = compat.get_device_name()
    differs = asked == "cpu" and platform != "cpu"
    return {"platform": platform, "torch": torch.__version__} if differs else None


def too_few_cpus(asked: Any, config: Any) -> Words | None:
    """Fewer processors than the placement groups of verl's processes and row queue wait for."""
    count = os.cpu_count() if asked is None else asked
    units = option(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", 1)
    needed = CPUS_OF_A_PROCESS * option(config, "trainer.n_gpus_per_node") + units + 1
    return {"count": count, "needed": needed} if count is not None and count < needed else None


def absent_tree_attention(name: Any, config: Any) -> Words | None:
    """Tree attention whose package or device this machine lacks. Workers check what depends on the model."""
    if option(config, "trainer.device") == "cpu" and name in IMPLEMENTATIONS:
        reason = unavailable_reason(name, device=torch.device("cpu"), dtype=torch.float32, head_size=64)
    else:
        reason = package_reason() if name == "fa4" else None
    return None if reason is None else {"reason": reason}


def absent_row_attention(name: Any, _: Any) -> Words | None:
    """An attention of transformers that is unknown or not installed; trees replace flash_attention_2 by themselves."""
    # Imported here, because other jobs do not need it.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import is_flash_attn_3_available, is_flash_attn_4_available

    installed = {"flash_attention_3": is_flash_attn_3_available, "flash_attention_4": is_flash_attn_4_available}
    if name in installed and not installed[name]():
        return {"reason": f"{name.replace('flash_attention_', 'flash-attn-')} does not work here"}
    if name is None or "/" in name or name in {*ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager"}:
        return None
    return {"reason": "transformers knows no attention of this name"}


# Environments of the workers.


def lacks_tree_rl(command: Any, config: Any) -> Words | None:
    """A command that starts Ray's workers without tree_rl; they would die, or the job would wait for them for ever."""
    words = [word for word in shlex.split(command or "") if not re.match(r"\w+=", word)]
    if not words or option(config, "ray_kwargs.ray_init.runtime_env.working_dir") is not None:
        return None
    program = shutil.which(os.path.expanduser(words[0]))
    if program is None:
        return {"reason": f"no program {words[0]} here", "remedy": "correct it, or leave the key out"}
    if any(Path(place, "tree_rl").is_dir() for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place):
        return None
    if Path(program).name == "uv" and "run" in words:
        return _uv_lacks(words)
    prefix = Path(program).parent.parent
    is_environment = (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    if not is_environment or _holds_tree_rl(prefix):
        return None
    return {"reason": f"{prefix} has no tree_rl", "remedy": f"install it: {program} -m pip install tree_rl"}


def _uv_lacks(words: Sequence[str]) -> Words | None:
    """Whether `uv run` starts a Python without tree_rl, as far as its project's files say so."""
    words = [part for word in words for part in word.split("=", 1)]
    asks = any("tree_rl" in word.replace("-", "_") for word in words)
    if asks or {"--no-project", "--active", "--with-requirements", "--script", "-s"} & {*words}:
        return None
    place = dict(pairwise(words))
    start = Path(place.get("--project", place.get("--directory", "."))).absolute()
    # A member of a workspace shares the lock and environment of a project above it.
    projects = [folder for folder in (start, *start.parents) if (folder / "pyproject.toml").is_file()]
    is_exact = bool({"--exact", "--isolated"} & {*words})
    if not projects or any(_project_has_tree_rl(project, is_exact=is_exact) for project in projects):
        return None
    project = next((project for project in projects if (project / "uv.lock").is_file()), projects[0])
    environment = _environment_of(project)
    return {
        "reason": f"neither {project / 'uv.lock'} nor {environment} has tree_rl",
        "remedy": f"uv pip install --python {environment}/bin/python tree_rl",
    }


def _environment_of(project: Path) -> Path:
    return project / os.environ.get("UV_PROJECT_ENVIRONMENT", ".venv")


def _project_has_tree_rl(project: Path, *, is_exact: bool) -> bool:
    """True if uv would install tree_rl, or would keep it although the lock lacks it, as it does by default."""
    files = [project / name for name in ("uv.lock", "pyproject.toml")]
    asked = any("tree_rl" in file.read_text("utf-8").replace("-", "_") for file in files if file.is_file())
    return asked or (not is_exact and _holds_tree_rl(_environment_of(project)))


def _holds_tree_rl(environment: Path) -> bool:
    """True if an environment has tree_rl, installed from a wheel or as a link to a checkout."""
    names = ("tree_rl", "tree_rl-*.dist-info")
    return any(found for name in names for found in environment.glob(f"lib/python*/site-packages/{name}"))


# Files and folders.


def missing_file(value: Any, _: Any) -> Words | None:
    """A path, or an entry of a list, that exists neither on this machine nor in verl's folder, which verl searches."""
    verl = find_spec("verl")
    assert verl is not None and verl.origin is not None
    for path in texts(value):
        places = os.path.expanduser(path), Path(verl.origin).parents[1] / path
        if "://" not in path and not any(os.path.exists(place) for place in places):
            return {"value": path}
    return None


def missing_folder(path: Any, _: Any) -> bool:
    """True for a local path that does not exist; other names may be a hub's."""
    if path is None or "://" in path:
        return False
    place = Path(path).expanduser()
    is_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    # A mistyped outputs/model has the form of a hub's id; an id seldom begins with a folder that is here.
    is_cached = Path(HF_HUB_CACHE, f"models--{path.replace('/', '--')}").exists()
    is_local = is_local or ("/" in path and place.parent.is_dir() and not is_cached)
    return is_local and not place.exists()


def unwritable_folder(path: Any, _: Any) -> Words | None:
    """A folder for results that cannot be made or written."""
    if path is None or "://" in path:
        return None
    whole = Path(path).expanduser().absolute()
    there = next(place for place in (whole, *whole.parents) if place.exists())
    return None if there.is_dir() and os.access(there, os.W_OK) else {"there": there}


def no_checkpoint(path: Any, config: Any) -> bool:
    """True if a job resumes from a path that names no folder of a checkpoint."""
    asks = option(config, "trainer.resume_mode") == "resume_path"
    return asks and not _is_checkpoint(Path(str(path)).expanduser())


def no_checkpoint_of_sft(path: Any, config: Any) -> bool:
    """The same for SFT, which also reads a path under `auto`, and `~` as a name."""
    mode = option(config, "trainer.resume_mode")
    is_read = mode == "resume_path" or (mode == "auto" and path is not None)
    return is_read and not _is_checkpoint(Path(str(path)))


def _is_checkpoint(path: Path) -> bool:
    return re.fullmatch(r"global_step_[1-9]\d*", path.name) is not None and path.is_dir()


def saved_by_other_ranks(mode: Any, config: Any) -> Words | None:
    """A checkpoint to resume from, of another number of ranks, as the names of the actor's files say."""
    folder = Path(str(option(config, "trainer.resume_from_path"))).expanduser()
    if mode == "auto":
        # For verl `~` in it is a name.
        root = Path(str(option(config, "trainer.default_local_dir")))
        tracker = root / "latest_checkpointed_iteration.txt"
        # A kill can leave anything in it, after which the trainer chooses another checkpoint.
        step = tracker.read_bytes()[:16].strip() if tracker.is_file() else b""
        folder = root / f"global_step_{int(step) if step.isdigit() else 0}"
    ranks = option(config, "trainer.n_gpus_per_node") * option(config, "trainer.nnodes")
    saved = [re.findall(r"\d+", file.name)[0] for file in folder.glob("actor/model_world_size_*_rank_0.pt")]
    if mode == "disable" or not saved or str(ranks) in saved:
        return None
    return {"folder": folder, "saved": saved[0], "ranks": ranks}


def incomplete_model(path: Any, model: Any) -> Words | None:
    """What a model's folder on this machine lacks."""
    needed: dict[str, tuple[str, ...]] = {"config.json": ("config.json",), "weights (*.safetensors)": WEIGHT_FILES}
    return _lacks(path, needed if option(model, "tokenizer_path") else needed | TOKENIZER)


def incomplete_tokenizer(path: Any, _: Any) -> Words | None:
    """What a tokenizer's folder on this machine lacks."""
    return _lacks(path, TOKENIZER)


def _lacks(path: Any, needed: Mapping[str, tuple[str, ...]]) -> Words | None:
    folder = Path(path or "").expanduser()
    absent = [what for what, names in needed.items() if not any(any(folder.glob(name)) for name in names)]
    return {"what": absent[0]} if path and folder.exists() and absent else None


def damaged_model(path: Any, model: Any) -> Words | None:
    """The first file of a model's folder on this machine that cannot be read; of weights, only headers are read."""
    names = ("model*.safetensors",)  # as transformers names what it reads
    return _damaged(path, names if option(model, "tokenizer_path") else names + TOKENIZER_JSON)


def damaged_tokenizer(path: Any, _: Any) -> Words | None:
    """The first file of a tokenizer's folder on this machine that cannot be read."""
    return _damaged(path, TOKENIZER_JSON)


def _damaged(path: Any, names: Sequence[str]) -> Words | None:
    folder = Path(path or "").expanduser()
    for file in [file for name in names for file in sorted(folder.glob(name))] if path else []:
        try:
            if file.suffix == ".json":
                # Not `parse_json`, which also refuses what tokenizers read, such as a key twice.
                if not isinstance(json.loads(file.read_bytes()), dict):
                    raise ValueError("expected a JSON object")
            else:
                with safe_open(file, framework="pt"):
                    pass
        except (OSError, ValueError, SafetensorError) as error:
            return {"file": file.name, "reason": error}
    return None


def lacks_name(key: str) -> Condition:
    """A condition for a user's module that Python cannot read, or that does not define the name at `key`."""

    def condition(path: Any, config: Any) -> Words | None:
        file, name = _source_of(path or ""), option(config, key)
        if not path or not name or not file.is_file():
            return None
        try:
            found = {*_names_in(ast.parse(file.read_bytes()))}
        except (SyntaxError, ValueError) as error:
            return {"reason": f"Python cannot read it ({error})", "remedy": "correct it"}
        # A module's own __getattr__ may make any name.
        known = {name, "*", "__getattr__"} & found
        return None if known else {"reason": f"it defines no {name}", "remedy": f"correct it, or {key}"}

    return condition


def _source_of(path: str) -> Path:
    """The file of verl's path of a module; for `pkg://` of a module that is not found here, the path itself."""
    if not path.startswith(PACKAGE):
        return Path(path).expanduser()
    try:
        spec = find_spec(path.removeprefix(PACKAGE).replace("/", "."))
    except ImportError:
        spec = None
    origin = None if spec is None else spec.origin
    return Path(origin if origin is not None and origin.endswith(".py") else path)


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name):
            yield node.id


def unusable_prompts(files: Any, config: Any) -> Words | None:
    """Files of prompts that verl's data set cannot read, without the prompt's column, or without rows."""
    column, num_rows, known = str(option(config, "data.prompt_key", "prompt")), 0, known_loops(config)
    if option(config, OWN_DATA_SET) is not None:
        return None
    for name in texts(files):
        path = Path(name).expanduser()
        if path.is_dir() or path.suffix not in ROW_FILES:
            return {"value": name, "reason": f"verl reads files that end in {', '.join(ROW_FILES)}"}
        if path.suffix != ".parquet" or not path.exists():
            return None
        try:
            parquet = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            return {"value": name, "reason": f"expected a whole parquet file ({str(error).partition('. ')[0]})"}
        columns = parquet.schema_arrow.names
        if column not in columns:
            return {"value": name, "reason": f"data.prompt_key={column} is none of its columns, {', '.join(columns)}"}
        loops = {*parquet.read([LOOP])[LOOP].unique().to_pylist()} if known and LOOP in columns else set()
        if loops - known:
            unknown = min(map(str, loops - known))
            return {"value": name, "reason": f"{LOOP} {unknown} is none of {', '.join(sorted(known))}"}
        num_rows += parquet.metadata.num_rows
    return None if num_rows else {"reason": "expected at least one row"}


def larger_than_data(batch: Any, config: Any) -> Words | None:
    """A batch larger than the prompts: verl would count no step in an epoch, and divide by that number."""
    files, most = _prompts(config), option(config, "data.train_max_samples", -1)
    rows = sum(file.metadata.num_rows for file in files)
    if files and batch > rows:
        return {"held": f"data.train_files have {counted(rows, 'row')}"}
    return {"held": f"data.train_max_samples={most}"} if 0 < most < batch else None


def unknown_loop(name: Any, config: Any) -> Words | None:
    """A default agent loop that does not exist, unless prompts name theirs."""
    known = known_loops(config)
    if name is None or not known or name in known:
        return None
    hint = did_you_mean(str(name), sorted(known), cutoff=0.6)
    is_asked = bool(_prompts(config)) and not name_their_loops(config)
    return {"hint": hint or f"; expected one of {', '.join(sorted(known))}"} if hint or is_asked else None


def lacks_agent(loop: Any, config: Any) -> Words | None:
    """The gateway's agent loop as the default, without an agent."""
    custom, name = option(config, f"{ROLLOUT}.custom") or {}, "gateway_agent"
    if loop != f"tree_{name}" or option(custom, f"{name}.agent") or name_their_loops(config):
        return None
    near = None if name in custom else next((other for other in custom if did_you_mean(str(other), [name])), None)
    as_meant = f"rename {ROLLOUT}.custom.{near}, which it does not read"
    return {"remedy": as_meant if near else "set it to the class of an agent as package.module.Class"}


def name_their_loops(config: Any) -> bool:
    """True if prompts may name their agent loops: files to train on with such a column, or a data set of the user's."""
    is_own = option(config, OWN_DATA_SET) is not None
    return is_own or any(LOOP in file.schema_arrow.names for file in _prompts(config))


def known_loops(config: Any) -> set[str]:
    """Names of the agent loops of this process and of the user's file; empty if workers may know others."""
    agent = option(config, f"{ROLLOUT}.agent")
    file = Path(option(agent, "agent_loop_config_path") or "").expanduser()
    others = option(agent, "agent_loop_manager_class"), option(config, "actor_rollout_ref.model.external_lib")
    if any(others) or not file.exists():
        return set()
    return {*compat._agent_loop_registry, *(str(entry.get("name", "")) for entry in _loops_in(file))}


def loop_without_module(path: Any, _: Any) -> Words | None:
    """An agent loop in the user's file whose package is not installed."""
    targets = [str(entry.get("_target_", "")) for entry in _loops_in(Path(path or "").expanduser())]
    absent = next((target for target in targets if target and find_spec(target.partition(".")[0]) is None), None)
    return None if absent is None else {"target": absent}


def _loops_in(file: Path) -> Any:
    return OmegaConf.load(file) if file.is_file() else ()


def _prompts(config: Any) -> list[pq.ParquetFile]:
    """The files of prompts to train on; empty if one is no parquet file, or if the data set is the user's."""
    paths = [Path(name).expanduser() for name in texts(option(config, "data.train_files"))]
    if option(config, OWN_DATA_SET) is not None or any(
        path.suffix != ".parquet" or not path.is_file() for path in paths
    ):
        return []
    return [pq.ParquetFile(path) for path in paths]
