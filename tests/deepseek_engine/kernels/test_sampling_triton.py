import pytest
import torch
from device_kernels import DEVICE, needs_device, random
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine import sampling as reference
from deepseek_engine.kernels import sampling_triton as kernels
from deepseek_engine.random_numbers import uniform

pytestmark = needs_device
VOCABULARY = 9001
INF = float("inf")


def make(count: int, vocabulary: int = VOCABULARY, **values: list) -> kernels.SamplingRows:
    """Rows that sample plainly but for the values given."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values.get(name, [default] * count), dtype=dtype, device=DEVICE)

    edits: list[dict[int, float]] = values.get("edits", [{}] * count)
    bits = torch.zeros(max(len(values.get("masks", [])), 1), -(-vocabulary // 8) * 8, dtype=torch.int32)
    for row, allowed in enumerate(values.get("masks", [])):
        bits[row, allowed] = 1
    packed = (bits.unflatten(1, (-1, 8)) << torch.arange(8)).sum(-1).to(torch.uint8)
    ends = torch.tensor([len(edit) for edit in edits]).cumsum(0)
    return kernels.SamplingRows(
        temperature=column("temperature", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        repetition=column("repetition", 1.0, torch.float32),
        frequency=column("frequency", 0.0, torch.float32),
        presence=column("presence", 0.0, torch.float32),
        seeds=column("seeds", 7, torch.int64),
        choices=column("choices", 0, torch.int32),
        positions=column("positions", 0, torch.int32),
        penalty_rows=column("penalty_rows", -1, torch.int32),
        counts=torch.tensor(values.get("counts", [[0]]), dtype=torch.int32, device=DEVICE),
        prompt=torch.tensor(values.get("prompt", [[0]]), dtype=torch.int8, device=DEVICE),
        mask_rows=column("mask_rows", -1, torch.int32),
        masks=packed.to(DEVICE),
        edit_starts=torch.cat((torch.zeros(1), ends)).to(torch.int32).to(DEVICE),
        edit_tokens=torch.tensor([t for edit in edits for t in edit] or [0], dtype=torch.int32, device=DEVICE),
        edit_values=torch.tensor([v for edit in edits for v in edit.values()] or [0.0], device=DEVICE),
    )


def expected(logits: Tensor, rows: kernels.SamplingRows) -> list[int]:
    x = logits.cpu() / rows.temperature.cpu().clamp(min=1e-9).unsqueeze(-1)
    x = reference.apply_min_p(x, rows.min_p.cpu().unsqueeze(-1))
    x = reference.apply_top_k(x, rows.top_k.cpu().long().unsqueeze(-1))
    x = reference.apply_top_p(x, rows.top_p.cpu().unsqueeze(-1))
    places = zip(rows.seeds.tolist(), rows.choices.tolist(), rows.positions.tolist(), strict=True)
    return reference.draw(x, torch.tensor([uniform(*place) for place in places], dtype=torch.float64)).tolist()


FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_k of all": {"top_k": VOCABULARY},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_seeded_row_gives_the_references_token(name: str) -> None:
    logits = random(3, VOCABULARY, scale=3.0)
    logits[1] = random(VOCABULARY, scale=0.02)
    values = {key: [value] * 3 for key, value in FILTERS[name].items()}
    rows = make(3, seeds=[1, -5, 2**62 + 3], choices=[0, 1, 0], positions=[0, 3, 1000], **values)
    tokens, status = kernels.sample(logits, rows)
    assert status.tolist() == [kernels.SOUND] * 3
    assert tokens.tolist() == expected(logits, rows)


def test_rows_of_different_parameters_do_not_touch_each_other() -> None:
    logits = random(4, VOCABULARY, scale=3.0)
    values = {"temperature": [0.0, 1.0, 0.5, 2.0], "top_k": [0, 3, 0, 50], "top_p": [1.0, 1.0, 0.5, 0.9]}
    together = kernels.sample(logits, make(4, **values))[0].tolist()
    for row in range(4):
        one = {name: [column[row]] for name, column in values.items()}
        assert kernels.sample(logits[row : row + 1], make(1, **one))[0].tolist() == together[row : row + 1]
    assert together[0] == int(logits[0].argmax())


def test_ties_at_a_filters_edge_stay() -> None:
    logits = torch.full((8, VOCABULARY), -50.0, device=DEVICE)
    logits[:, [10, 5000, 8999]] = 2.0
    logits[:, 77] = 3.0
    found = kernels.sample(logits, make(8, top_k=[2] * 8, seeds=list(range(8))))[0].tolist()
    assert found == expected(logits, make(8, top_k=[2] * 8, seeds=list(range(8))))
    assert set(found) <= {10, 77, 5000, 8999}
    assert len(set(found)) > 1


def test_penalties_biases_and_masks_equal_the_reference() -> None:
    logits = random(3, VOCABULARY, scale=2.0)
    counts = torch.zeros(2, VOCABULARY, dtype=torch.int32)
    counts[0, [3, 4000]] = torch.tensor([2, 1], dtype=torch.int32)
    prompt = torch.zeros(2, VOCABULARY, dtype=torch.bool)
    prompt[1, ::2] = True
    allowed = list(range(0, VOCABULARY, 3))
    edits = [{5: 4.0, 9000: -INF}, {}, {0: 100.0}]
    factors = {"repetition": [1.3, 1.5, 1.0], "frequency": [0.5, 0.0, 0.0], "presence": [0.2, 0.1, 0.0]}
    rows = make(
        3,
        temperature=[0.0] * 3,
        penalty_rows=[0, 1, -1],
        counts=counts.tolist(),
        prompt=prompt.int().tolist(),
        edits=edits,
        mask_rows=[-1, 0, -1],
        masks=[allowed],
        **factors,
    )
    edited = logits.cpu().clone()
    columns = [torch.tensor(factors[name][:2]).unsqueeze(-1) for name in ("repetition", "frequency", "presence")]
    edited[:2] = reference.apply_penalties(edited[:2], counts, prompt, *columns)
    for row, edit in enumerate(edits):
        for token, value in edit.items():
            edited[row, token] += value
    forbidden = torch.ones(VOCABULARY, dtype=torch.bool)
    forbidden[allowed] = False
    edited[1, forbidden] = -INF
    tokens, _ = kernels.sample(logits, rows)
    assert tokens.tolist() == edited.argmax(-1).tolist()
    counts[0, tokens[0]] += 1
    counts[1, tokens[1]] += 1
    assert torch.equal(rows.counts.cpu(), counts)


def test_broken_logits_and_empty_masks_are_told() -> None:
    logits = random(4, VOCABULARY)
    logits[0, 8000] = float("nan")
    logits[1, 3] = INF
    rows = make(4, mask_rows=[-1, -1, 0, -1], masks=[[]])
    tokens, status = kernels.sample(logits, rows)
    assert status.tolist() == [kernels.NOT_NUMBERS, kernels.NOT_NUMBERS, kernels.NOTHING_LEFT, kernels.SOUND]
    assert tokens[:3].tolist() == [0, 0, 0]


def test_a_padded_row_draws_nothing() -> None:
    rows = make(2, positions=[-1, 0], penalty_rows=[0, -1], counts=[[0] * VOCABULARY], prompt=[[0] * VOCABULARY])
    tokens, _ = kernels.sample(random(2, VOCABULARY), rows)
    assert tokens[0] == 0
    assert (rows.counts == 0).all()


def test_draws_follow_the_distribution() -> None:
    count = 200
    logits = torch.full((count, 64), -INF, device=DEVICE)
    logits[:, 7], logits[:, 40] = 0.0, 1.0
    found = kernels.sample(logits, make(count, 64, positions=list(range(count))))[0]
    share = float((found == 40).double().mean())
    assert set(found.tolist()) == {7, 40}
    assert abs(share - 0.731) < 0.1
