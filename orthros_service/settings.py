"""Every setting of the service, in one place. The only reader of the environment.

Variables are `ORTHROS_<GROUP>__<NAME>`, for example `ORTHROS_GATEWAY__PORT=8080`. Unknown names
are refused.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from orthros_service.errors import InvalidValueError, validator_reason

MIB = 1024 * 1024
PREFIX = "ORTHROS_"
CLIENT_PREFIX = "ORTHROS_CLIENT_"
"""Variables of the client's commands; not settings of the service."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Group):
    """Which model is served and in what number format."""

    directory: Path = Field(
        Path("models/smollm2-135m-instruct"), description="Hugging Face or Orthros model directory."
    )
    device: str = Field("auto", description="'auto', 'cpu', 'cuda' or 'cuda:N'.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description=(
            "Weights and K/V. 'auto' is bfloat16 where the processor computes in it, else float32."
        ),
    )
    decode_weights: Literal["native", "int8"] = Field(
        "native",
        description="Weight format of decode steps on the CPU; 'int8' is per output channel.",
    )
    kernels: Literal["auto", "triton", "reference"] = Field(
        "auto",
        description=(
            "Attention kernels. 'auto' is Triton on a GPU and plain torch on the CPU; 'reference' "
            "is slow and for comparisons; 'triton' needs a GPU."
        ),
    )
    num_threads: PositiveInt | None = Field(
        None, description="Threads per worker process; None leaves torch's choice."
    )


class PrefillSettings(_Group):
    """How documents are ingested."""

    segment_tokens: PositiveInt = Field(
        2048, description="Tokens per prefill step and per stored segment."
    )
    full_prefill_max_tokens: PositiveInt | None = Field(
        None,
        description=(
            "Longest document that is prefilled in full attention; None takes the model's own "
            "value."
        ),
    )
    step_timeout_s: float = Field(
        120.0, gt=0, description="Seconds that one prefill step may take before it is retried."
    )
    num_retries: Annotated[int, Field(ge=0)] = Field(
        2, description="Times a failed prefill step is sent again."
    )


class DecodeSettings(_Group):
    """How answers are generated."""

    max_sequences: PositiveInt = Field(
        16, description="Sequences decoded together by one worker; more wait in its queue."
    )
    max_tail_tokens: PositiveInt = Field(
        8192, description="Most tokens of question, history and answer together."
    )
    stream_interval_s: float = Field(
        0.02, ge=0, description="Seconds over which streamed tokens are coalesced."
    )


class DocumentSettings(_Group):
    """Where documents live and how large they may be."""

    database_url: str = Field(
        "sqlite:///data/orthros.db", description="SQLAlchemy URL of the catalogue."
    )
    text_uri: str = Field(
        "data/texts", description="Folder or pyarrow filesystem URI of the texts."
    )
    max_bytes: PositiveInt = Field(64 * MIB, description="Largest document, in bytes of UTF-8.")
    max_tokens: PositiveInt = Field(2_000_000, description="Longest document, in tokens.")


class StateSettings(_Group):
    """Where attention states are kept; they are a cache and can always be rebuilt from text."""

    uri: str = Field(
        "data/states", description="Folder or pyarrow filesystem URI of stored states."
    )
    memory_bytes: PositiveInt = Field(
        4096 * MIB, description="Bytes of states kept in memory, least recently used out first."
    )


class GatewaySettings(_Group):
    """The HTTP face."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8000, description="TCP port to listen on.")
    default_deadline_s: float = Field(
        600.0, gt=0, description="Seconds until a request without a deadline ends."
    )
    max_json_bytes: PositiveInt = Field(72 * MIB, description="Largest JSON body, in bytes.")
    max_concurrent_requests: PositiveInt = Field(
        64, description="Generations that run at the same time; more wait for their turn."
    )
    max_waiting_requests: Annotated[int, Field(ge=0)] = Field(
        128, description="Generations that may wait for their turn; more are refused with 429."
    )


class DeploymentSettings(_Group):
    """How the workers are laid out on Ray."""

    ray_address: str | None = Field(
        None,
        description="Address of a running Ray cluster; not set starts one on this machine.",
    )
    num_gateways: PositiveInt = Field(1, description="Gateway replicas.")
    num_prefill_workers: PositiveInt = Field(1, description="Prefill replicas.")
    num_decode_workers: PositiveInt = Field(1, description="Decode replicas.")
    worker_cpus: float = Field(
        1.0, gt=0, description="Logical Ray processors that a prefill or decode replica reserves."
    )
    object_store_bytes: PositiveInt | None = Field(
        None,
        description=(
            "Shared memory for states on a Ray that we start; not set fits it to "
            "state.memory_bytes and the machine."
        ),
    )
    http_proxy: Literal["python", "haproxy"] = Field(
        "python",
        description=(
            "Ray Serve's HTTP proxy on a Ray that we start; 'haproxy' is for many connections, "
            "and opens its statistics on every interface."
        ),
    )
    shutdown_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that running requests have to finish when a replica stops."
    )


class LogSettings(_Group):
    """How the service logs."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severe level that is written."
    )
    format: Literal["text", "json"] = Field("text", description="'json' for production.")


class Settings(BaseSettings):
    """All settings; build it once at an entry point and pass sub-models down."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        validate_default=True,
    )

    model: ModelSettings = ModelSettings()
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    documents: DocumentSettings = DocumentSettings()
    state: StateSettings = StateSettings()
    gateway: GatewaySettings = GatewaySettings()
    deployment: DeploymentSettings = DeploymentSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _reject_unknown_variables(self) -> Self:
        groups = {f"{PREFIX}{name.upper()}" for name in type(self).model_fields}
        unknown = sorted(
            name
            for name in os.environ
            if name.startswith(PREFIX)
            and not name.startswith(CLIENT_PREFIX)
            and name.split("__", 1)[0] not in groups
        )
        if unknown:
            raise ValueError(
                f"unknown environment variables {', '.join(unknown)}; "
                f"known groups are {', '.join(sorted(groups))}"
            )
        return self


def load_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        InvalidValueError: A variable is unknown or has a value that is not allowed; the message
            names it.
    """
    try:
        return Settings()
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors()]
        raise InvalidValueError(f"The settings are not valid. {' '.join(problems)}") from error
    except ValueError as error:
        raise InvalidValueError(f"The settings are not valid: {error}") from error


def _problem(detail: Mapping[str, Any]) -> str:
    """One sentence on one variable: what is wrong, and the nearest name if it is unknown."""
    places = [str(place) for place in detail["loc"]]
    name = PREFIX + "__".join(places).upper()
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, _variable_names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else "; docs/settings.md lists them all."
        return f"{name} is not a setting{hint}"
    reason = validator_reason(detail["msg"]).rstrip(".")
    if not places:
        return f"{reason}."
    return f"{name} is {detail['input']!r}: {reason[:1].lower()}{reason[1:]}."


def _variable_names() -> list[str]:
    return [
        f"{PREFIX}{group}__{name}".upper()
        for group, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for name in field.annotation.model_fields
    ]
