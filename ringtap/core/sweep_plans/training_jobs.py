"""Reads the training jobs of a plan (docs/reference/plan.md)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringtap.core.errors import did_you_mean
from ringtap.core.ethernet import payload_share
from ringtap.core.sweep_plans.cluster_hosts import OWN_VARIABLES
from ringtap.core.sweep_plans.collective_algorithms import Collectives
from ringtap.core.thesis_neural_networks import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    GRADIENT_BYTES,
    PROFILES,
    profile_of,
    ring_bytes,
)
from ringtap.core.toml_tables import TomlTable
from ringtap.core.training_transports import VARIABLES, carrier_of, label_problem
from ringtap.core.units import parse_duration_s, parse_size_bytes

FRAMEWORKS = ("ddp", "horovod")
SCALE_MODEL, REAL, COMMAND = "scale-model", "real", "command"  # jobs of a model
LAUNCHES = ("ranks", "host")
# placeholders of a command, in braces: agents/sweep/job_launch_commands.py puts a host's values in their place
PLACEHOLDERS = ("python", "host", "address", "ranks", "hosts", "host_rank", "master_addr", "master_port")
MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}"


@dataclass(frozen=True)
class Model:
    """One training job of a sweep; sizes are full-size, divided by the plan's scale when run.

    Attributes:
        name: as used in series names.
        title: as used in reports.
        parameters: parameter count.
        layers: equal layers of the scale model's gradient; None: the tensors of the profile of this name.
        compute_s: compute time of an iteration.
        bucket_bytes: DDP's bucket size, Horovod's fusion threshold.
        first_bucket_bytes: size of DDP's first bucket.
        thesis_iteration_s: mean iteration time without cross traffic in Table 3.1, if it is one of its models.
        command: the user's own job instead of the scale model; `PLACEHOLDERS` stand for values that differ by host.
        launch: ``ranks``: the command is started once per rank, with the variables that torchrun would set; ``host``:
            once per worker, and starts its ranks itself.
        directory: folder on each worker in which the command is started; empty: where the host's commands start.
        environment: variables of the job, with those that its transport implies.
        framework: what synchronises the gradients: ``ddp``, or ``horovod``, whose variables the job gets too.
        job: what trains: ``scale-model``, ``real`` (the model itself) or ``command``.
        batch: samples of a rank in an iteration; None: not known.
        transport: label of the transport of the training traffic: ``tcp``, ``rdma``, or one that begins with either;
            empty: not given. A plan may have a model once per transport.
        collective: one of `ringtap.core.sweep_plans.collective_algorithms.COLLECTIVES`, which exchanges the gradients;
            empty: the all-reduce of the job's backend.
        topology: topology of the testbed on which it is measured; empty: the plan has one only.
    """

    name: str
    title: str
    parameters: int
    layers: int | None
    compute_s: float
    bucket_bytes: int
    first_bucket_bytes: int
    thesis_iteration_s: float | None
    command: tuple[str, ...] = ()
    framework: str = "ddp"
    launch: str = "ranks"
    directory: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    job: str = SCALE_MODEL
    batch: int | None = None
    transport: str = ""
    collective: str = ""
    topology: str = ""

    @property
    def label(self) -> str:
        """Name, transport, collective and topology, which identify it in a plan."""
        return model_label(self.name, self.transport, self.collective, self.topology)

    def series(self, kind: str) -> str:
        """Return the name of its series under a kind of cross traffic."""
        return series_name(self.name, kind, self.transport, self.collective, self.topology)

    def exchange_s(self, ranks: int, scale: float, rate_bps: float, mtu: int) -> float:
        """Return the time of a ring all-reduce of all its gradients.

        Args:
            ranks: ranks of the job.
            scale: factor by which gradients are smaller.
            rate_bps: rate of frames on the links that is left for it.
            mtu: bytes of an IP packet.
        """
        sent_bytes = ring_bytes(GRADIENT_BYTES * self.parameters / scale, ranks)
        return 8 * sent_bytes / (rate_bps * payload_share(mtu))


def model_label(name: str, transport: str = "", collective: str = "", topology: str = "") -> str:
    """Return the text that identifies a model in a plan."""
    parts = (("over", transport), ("by", collective), ("on", topology))
    return name + "".join(f" {word} {value}" for word, value in parts if value)


def series_name(model: str, kind: str, *variants: str) -> str:
    """Return the name of a series of a model, with its `ringtap.core.run_directory_schema.VARIANTS`."""
    return "-".join(part for part in (model, kind, *variants) if part)


def read_model(table: TomlTable, scale: float, collectives: Collectives, key: str = "name") -> Model:
    """Return a model, whose name is the value of a key."""
    given = table.text(key, ...)
    profile = profile_of(given)
    name = given if profile is None else profile.name
    if not re.fullmatch(MODEL_NAME, name):
        table.fail(key, f"= {name!r} is not a plain name (letters, digits, dot, dash)")
    command = table.texts("command", [])
    job = table.text("job", COMMAND if command else SCALE_MODEL, (SCALE_MODEL, REAL))
    _check_job(table, job, scale, name)
    if profile is None and not command and not table.has("compute"):
        hint = did_you_mean(name, PROFILES) or f"take one of {', '.join(PROFILES)}, or "
        table.fail(key, f"= {name!r} is not a profile: {hint}give parameters and compute, or a command")
    own: Any = ... if profile is None else None
    layers = table.integer("layers", 0, 1, 10_000) or None
    if layers is None and not command:
        if profile is None:
            table.fail("layers", f"is missing: {name} has no tensors that are known, so give a number of equal layers")
        if table.has("parameters"):
            table.fail(
                "parameters", f"needs layers too: the tensors of {name} have {profile.parameters:,} in all, fixed"
            )
    bucket_bytes = int(table.quantity("bucket", f"{BUCKET_BYTES}B", parse_size_bytes))
    transport = table.text("transport", "")
    if transport and (problem := label_problem(transport)):
        table.fail("transport", f"= {transport!r} {problem}")
    compute = f"{profile.compute_s}s" if profile else ("1s" if command else ...)
    model = Model(
        name=name,
        title=table.text("title", profile.title if profile else name),
        parameters=table.integer("parameters", profile.parameters if profile else own, 1, 10**13),
        layers=layers,
        compute_s=table.quantity("compute", compute, parse_duration_s),
        bucket_bytes=bucket_bytes,
        # DDP begins with a small bucket only if the job asks for no size
        first_bucket_bytes=bucket_bytes if table.has("bucket") else FIRST_BUCKET_BYTES,
        thesis_iteration_s=profile.thesis_iteration_s if profile else None,
        command=command,
        framework=table.text("framework", "ddp", FRAMEWORKS),
        launch=table.text("launch", "ranks", LAUNCHES),
        directory=table.text("directory", ""),
        environment=VARIABLES.get(carrier_of(transport), {}) | table.variables("environment", OWN_VARIABLES),
        job=job,
        batch=table.integer("batch", 0, 1, 10**9) or (profile.batch if profile and not command else None),
        transport=transport,
    )
    table.finish()
    _check_command(table, model)
    if collectives.names and model.framework == "horovod":
        table.fail("framework", '= "horovod" brings collectives of its own: leave [sweep] collective out')
    return model


def _check_job(table: TomlTable, job: str, scale: float, name: str) -> None:
    """Refuse a job beside a command, and a real model that does not exist, is changed or has scaled links."""
    if table.has("job") and table.has("command"):
        table.fail("job", "does not go with a command of your own: leave one of them out")
    if job != REAL:
        return
    real = [one.name for one in PROFILES.values() if one.library]
    if name not in real:
        table.fail("job", f'= "{REAL}" is for {", ".join(real)}: give another model of your own as a command')
    for key in ("layers", "compute", "parameters"):
        if table.has(key):
            table.fail(key, f'does not go with job = "{REAL}": the model itself trains, so leave it out')
    if scale != 1:
        table.fail("job", f'= "{REAL}" needs scale = 1: its gradients are full-size, and links at 1:{scale:g} are not')


def _check_command(table: TomlTable, model: Model) -> None:
    """Refuse keys that only the user's own command can have, and misspelt placeholders."""
    for key in ("launch", "directory"):
        if table.has(key) and not model.command:
            table.fail(key, "is for a command of your own, and this model has none")
    if model.launch == "host" and model.framework == "horovod":
        table.fail("launch", '= "host" does not work with framework = "horovod", whose ranks ringtap starts')
    if model.command and not model.command[0]:
        table.fail("command", "begins with an empty word instead of a program")
    for word in model.command:
        for name in re.findall(r"\{([a-z_]+)\}", word):
            near = difflib.get_close_matches(name, PLACEHOLDERS, 1, 0.75)
            if near and name not in PLACEHOLDERS:
                table.fail("command", f"holds {{{name}}}; did you mean {{{near[0]}}}?")
    if "\0" in model.directory:
        table.fail("directory", "holds a zero byte")
