"""A tiny random model in fp32 and what the engine tests build on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from orthros_service.engine.decode import DecodeEngine
from orthros_service.engine.prefill import PrefillEngine
from orthros_service.engine.types import (
    DecodeDelta,
    DecodeFinished,
    DecodeWork,
    PrefillStep,
    context_segments,
)
from orthros_service.model.config import ModelConfig, OrthrosConfig
from orthros_service.model.loading import LoadedModel
from orthros_service.model.transformer import Transformer
from orthros_service.state.types import AttentionState, Segment, StateHandle, StateLayout
from orthros_service.types import PrefillMode, SamplingParameters

VOCAB = 97
SEGMENT = 96


def _model(temperature: bool) -> LoadedModel:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=1000.0,
        rope_scaling=None,
        max_position_embeddings=256,
        has_tied_embeddings=True,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
    )
    c_LH = tuple(tuple(0.1 * (h + 1) for h in range(6)) for _ in range(3)) if temperature else None
    orthros = OrthrosConfig(
        window=32,
        num_sinks=4,
        tile=16,
        is_converted=False,
        trained_context_tokens=256,
        full_prefill_max_tokens=256,
        max_context_tokens=4096,
        decode_temperature=c_LH,
        evidence_layers=(1,),
    )
    torch.manual_seed(7)
    model = Transformer(config, orthros).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return LoadedModel(
        model=model,
        config=config,
        orthros=orthros,
        digest="tiny",
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_parameters=1,
    )


class CharacterStream:
    """Each token is one printable character."""

    def push(self, token_id: int) -> str:
        return chr(0x100 + token_id)

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Bench:
    """The tiny model with shorthands."""

    loaded: LoadedModel
    uses_kernels: bool = False

    def layout(self, mode: PrefillMode, segment_tokens: int = SEGMENT) -> StateLayout:
        return StateLayout(
            model_digest="tiny",
            tokenizer_digest="none",
            num_layers=3,
            num_kv_heads=2,
            head_dim=16,
            dtype="float32",
            window=32,
            num_sinks=4,
            mode=mode,
            segment_tokens=segment_tokens,
        )

    def prefill(
        self, token_ids: list[int], mode: PrefillMode, segment_tokens: int = SEGMENT
    ) -> AttentionState:
        layout = self.layout(mode, segment_tokens)
        engine = PrefillEngine(self.loaded, layout, uses_kernels=self.uses_kernels)
        segments: list[Segment] = []
        for start in range(0, len(token_ids), segment_tokens):
            part = np.asarray(token_ids[start : start + segment_tokens], np.int32)
            places = np.arange(start, start + len(part), dtype=np.int64)
            step = PrefillStep(
                layout=layout, start=start, token_ids=part, char_starts=places, char_ends=places + 1
            )
            context = [segments[i] for i in context_segments(layout, len(segments))]
            segments.append(engine.step(step, context))
        return AttentionState(layout=layout, segments=tuple(segments))

    def engine(self, mode: PrefillMode = "linear") -> DecodeEngine:
        return self.engine_of(self.layout(mode))

    def engine_of(self, layout: StateLayout) -> DecodeEngine:
        return DecodeEngine(
            self.loaded, layout, new_stream=CharacterStream, uses_kernels=self.uses_kernels
        )

    @staticmethod
    def work(
        request_id: str,
        states: list[tuple[str, AttentionState]],
        tail: list[int],
        *,
        max_tokens: int = 8,
        stop_ids: tuple[int, ...] = (),
        **sampling: Any,
    ) -> DecodeWork:
        handles = tuple(
            StateHandle(
                content_key=key,
                layout=state.layout,
                segments=(),
                num_tokens=state.num_tokens,
                num_bytes=state.num_bytes,
            )
            for key, state in states
        )
        return DecodeWork(
            request_id=request_id,
            documents=handles,
            tail_ids=tuple(tail),
            sampling=SamplingParameters(max_tokens=max_tokens, **sampling),
            stop_ids=frozenset(stop_ids),
        )

    @staticmethod
    def run(engine: DecodeEngine) -> tuple[dict[str, str], dict[str, DecodeFinished]]:
        """Texts and last outputs by request id; nothing may follow a last output."""
        deltas: dict[str, str] = {}
        finished: dict[str, DecodeFinished] = {}
        while engine.has_work:
            for request_id, output in engine.step():
                assert request_id not in finished
                if isinstance(output, DecodeDelta):
                    deltas[request_id] = deltas.get(request_id, "") + output.text
                else:
                    assert isinstance(output, DecodeFinished), output
                    finished[request_id] = output
        return deltas, finished

    @staticmethod
    def ids(text: str) -> list[int]:
        return [ord(character) - 0x100 for character in text]

    @staticmethod
    def greedy(
        logits_of: Callable[[torch.Tensor], torch.Tensor], prompt: list[int], count: int
    ) -> list[int]:
        """Greedy tokens by whole passes, without any cache."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(logits_of(torch.tensor(ids))[-1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="session", params=[False, True], ids=["plain", "kernels"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Once on the CPU's own path, once through the tables and interfaces of the CUDA kernels."""
    return Bench(_model(temperature=False), uses_kernels=request.param)


@pytest.fixture(scope="session", params=[False, True], ids=["plain", "kernels"])
def warm_bench(request: pytest.FixtureRequest) -> Bench:
    """The same with a decode temperature, whose effect begins at token 8192 only."""
    return Bench(_model(temperature=True), uses_kernels=request.param)


@pytest.fixture
def tokens() -> Callable[[int, int], list[int]]:
    def draw(count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()  # type: ignore[no-any-return]

    return draw
