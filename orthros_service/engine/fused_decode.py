"""Decode steps on CUDA: the kernels' tables, and graphs of the steps that repeat."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from orthros_kernels import DecodePlan, PlanSize, build_plan, move_plan, overwrite_plan
from orthros_service.engine.placement import Placement
from orthros_service.model.attention import log_length
from orthros_service.model.batches import EvidenceRecord, PlannedDecodeBatch
from orthros_service.model.loading import LoadedModel
from orthros_service.model.rope import RotaryTable

logger = logging.getLogger(__name__)

# Programs per multiprocessor that hide the latency of memory.
_PROGRAMS_PER_PROCESSOR = 2
_MAX_GRAPHS = 16


@dataclass(slots=True, kw_only=True)
class _Graph:
    """A captured step and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: "_Inputs"
    logits: Tensor
    evidence: EvidenceRecord
    signature: tuple[tuple[str, int], ...]
    positions: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What one step reads, on the device; `growth` tells which rows move on with every step."""

    plan: DecodePlan
    numbers: Tensor
    token_ids: Tensor
    positions: Tensor
    tail_addresses: Tensor
    tail_capacities: Tensor
    tail_rows: Tensor
    growth: Tensor
    entry_offsets: Tensor
    entry_growth: Tensor


class FusedDecoder:
    """Runs decode steps of one model on one device. Not thread-safe.

    Made for CUDA; elsewhere the same tables run through the operators' references, without graphs,
    for tests.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._rotary = RotaryTable(loaded.config, device=loaded.device)
        self._num_q_heads = loaded.config.num_q_heads
        self._evidence_layers = frozenset(loaded.orthros.evidence_layers)
        temperature = loaded.orthros.decode_temperature
        self._temperature_LH = (
            None
            if temperature is None
            else torch.tensor(temperature, dtype=torch.float32, device=loaded.device)
        )
        # Rows that only fill a graph write their keys here.
        self._scratch = loaded.model.new_kv(1)
        self._graphs: dict[PlanSize, _Graph] = {}
        self._num_programs = _PROGRAMS_PER_PROCESSOR
        if loaded.device.type == "cuda":
            properties = torch.cuda.get_device_properties(loaded.device)
            self._num_programs *= properties.multi_processor_count

    def hidden_states(
        self, placement: Placement, *, wants_evidence: bool
    ) -> tuple[Tensor, EvidenceRecord | None]:
        """One pass, launched kernel by kernel: for steps that bring in new tokens.

        Returns:
            Hidden states [R, M], and the queries of the evidence layers if they are wanted.
        """
        inputs = self._upload(placement, self._plan(placement, None))
        evidence = EvidenceRecord(layers=self._evidence_layers) if wants_evidence else None
        batch = self._batch(inputs, evidence)
        return self._model.hidden_states(inputs.token_ids, batch), evidence

    def write_document(self, placement: Placement) -> None:
        """Keys and values of document tokens in decode mode."""
        inputs = self._upload(placement, self._plan(placement, None))
        self._model.write_document(inputs.token_ids, self._batch(inputs, None))

    def repeated_step(self, placement: Placement) -> tuple[Tensor, EvidenceRecord]:
        """One token for every sequence, as one replay of a CUDA graph.

        Returns:
            Logits [R, V], and the queries of the evidence layers; both are overwritten by the next
            step of as many rows.
        """
        if self._device.type != "cuda":
            return self._graph_body(self._upload(placement, self._plan(placement, None)))
        graph = self._current_graph(placement)
        if graph is None:
            plan = self._plan(placement, None)
            size = _roomy(plan.size)
            plan = self._plan(placement, size)
            graph = self._graphs.get(size)
            if graph is None:
                graph = self._capture(placement, plan)
            else:
                self._rewrite(graph, placement, plan)
        else:
            graph.inputs.token_ids[: placement.num_rows].copy_(
                torch.tensor(placement.token_ids), non_blocking=True
            )
        graph.graph.replay()
        graph.positions = [position + 1 for position in placement.positions]
        graph.signature = placement.signature
        return graph.logits[: placement.num_rows], graph.evidence

    def _current_graph(self, placement: Placement) -> _Graph | None:
        """The graph whose tables already describe this step."""
        for graph in self._graphs.values():
            if (graph.signature, graph.positions) == (placement.signature, placement.positions):
                return graph
        return None

    def _plan(self, placement: Placement, size: PlanSize | None) -> DecodePlan:
        return build_plan(
            placement.runs,
            num_rows=placement.num_rows if size is None else size.rows,
            num_q_heads=self._num_q_heads,
            num_programs=self._num_programs,
            size=size,
        )

    def _upload(self, placement: Placement, plan: DecodePlan) -> _Inputs:
        plan_there = move_plan(plan, self._device)
        numbers = self._numbers(placement, plan.size).to(self._device)
        return _inputs(plan_there, numbers)

    def _numbers(self, placement: Placement, size: PlanSize) -> Tensor:
        """Everything but the plan in one tensor: one copy to the device."""
        rows, spare = placement.num_rows, size.rows - placement.num_rows
        spare_entries = size.entries - len(placement.entry_offsets)
        documents = len(placement.entry_offsets) - rows
        return torch.tensor(
            placement.token_ids + [0] * spare
            + placement.positions + [0] * spare
            + placement.tail_addresses + [self._scratch.data_ptr()] * spare
            + placement.tail_capacities + [1] * spare
            + placement.tail_rows + [0] * spare
            + [1] * rows + [0] * spare
            + placement.entry_offsets + [0] * spare_entries
            + [0] * documents + [1] * rows + [0] * spare_entries,
            dtype=torch.int64,
        )  # fmt: skip

    def _batch(self, inputs: _Inputs, evidence: EvidenceRecord | None) -> PlannedDecodeBatch:
        entry_positions = inputs.positions[inputs.plan.entry_rows] - inputs.entry_offsets
        return PlannedDecodeBatch(
            plan=inputs.plan,
            entry_cos_sin=self._rotary.half_cos_sin(entry_positions),
            row_cos_sin=self._rotary.half_cos_sin(inputs.positions),
            tail_addresses=inputs.tail_addresses,
            tail_capacities=inputs.tail_capacities,
            tail_rows=inputs.tail_rows,
            log_length_R=log_length(inputs.positions, self._model.orthros.decode_temperature),
            temperature_LH=self._temperature_LH,
            evidence=evidence,
        )

    def _graph_body(self, inputs: _Inputs) -> tuple[Tensor, EvidenceRecord]:
        evidence = EvidenceRecord(layers=self._evidence_layers)
        hidden = self._model.hidden_states(inputs.token_ids, self._batch(inputs, evidence))
        logits = self._model.logits(hidden)
        for moving in (inputs.positions, inputs.tail_rows):
            moving.add_(inputs.growth)
        inputs.plan.limits.add_(inputs.entry_growth)
        return logits, evidence

    def _capture(self, placement: Placement, plan: DecodePlan) -> _Graph:
        """Warm up on a side stream, capture, and put the moved numbers back."""
        inputs = self._upload(placement, plan)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._graph_body(inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._restore(inputs, placement, plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, evidence = self._graph_body(inputs)
        logger.info(
            "Captured a decode step of up to %d rows and %d work items as a CUDA graph",
            plan.size.rows,
            plan.size.items,
        )
        if len(self._graphs) >= _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        captured = _Graph(
            graph=graph,
            inputs=inputs,
            logits=logits,
            evidence=evidence,
            signature=placement.signature,
            positions=placement.positions,
        )
        self._graphs[plan.size] = captured
        return captured

    def _rewrite(self, graph: _Graph, placement: Placement, plan: DecodePlan) -> None:
        # A graph that was used last is the last to be let go.
        self._graphs[plan.size] = self._graphs.pop(plan.size)
        self._restore(graph.inputs, placement, plan)

    def _restore(self, inputs: _Inputs, placement: Placement, plan: DecodePlan) -> None:
        overwrite_plan(inputs.plan, plan)
        inputs.numbers.copy_(self._numbers(placement, plan.size))


def _inputs(plan: DecodePlan, numbers: Tensor) -> _Inputs:
    size = plan.size
    parts = torch.split(numbers, [size.rows] * 6 + [size.entries] * 2)
    return _Inputs(
        plan=plan,
        numbers=numbers,
        token_ids=parts[0],
        positions=parts[1],
        tail_addresses=parts[2],
        tail_capacities=parts[3],
        tail_rows=parts[4],
        growth=parts[5],
        entry_offsets=parts[6],
        entry_growth=parts[7],
    )


def _roomy(size: PlanSize) -> PlanSize:
    """Room for compositions like this one, so that few graphs serve many."""
    return PlanSize(
        rows=_power_of_two(size.rows),
        entries=_power_of_two(size.entries),
        items=_power_of_two(size.items),
        slots=_power_of_two(size.slots),
        block_m=size.block_m,
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
