"""Golden prompts on a real server: a canary whose weights are wrong fails by them, an equal one passes."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deepseek_engine.request import EngineRequest
from deepseek_engine.torch_version import open_torch
from piccard.home_init import init_home
from piccard.operation import operation
from piccard.policy_store import load_policy
from piccard.rollout.commands import abort, start, status
from piccard.rollout.golden_prompts import BUILT_IN, GoldenPrompt
from piccard.rollout.golden_scores import compare
from piccard.rollout.plan_file import read_plan
from piccard_canary.rollout.golden import GoldenScore
from piccard_contract.sampling import SamplingParams
from piccard_contract.version_file import Runner, VersionFile
from piccard_server import RunningServer, scripted_version, wait_for
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).parents[2] / "assets" / "demo"
SETTINGS = {"runner": Runner.TORCH, "memory": "256MiB", "device": "cpu", "linked": True}

# Of the noise on every matrix, in standard deviations of its weights.
NOISE = 0.5

PLAN = {"steps": [0.05, 1.0], "interval": 600, "look": 0.5}
NOTHING_ENDS = threading.Event()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Versions 1, stable, and 3 are the demo checkpoint, 2 is the same with noise on its weights, 4 is scripted."""
    folder = tmp_path_factory.mktemp("golden")
    checkpoints = {1: DEMO, 2: noisy(folder / "noisy"), 3: DEMO}
    versions = {
        number: VersionFile.model_validate({"label": f"v1.{number}.0", "checkpoint": str(path), **SETTINGS})
        for number, path in checkpoints.items()
    }
    init_home(folder / "home", versions | {4: scripted_version("v1.4.0")})
    running = RunningServer(folder / "home")
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def noisy(folder: Path) -> Path:
    """The demo checkpoint with noise on its weights."""
    shutil.copytree(DEMO, folder)
    random = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() >= 2:
                noise = torch.randn(weight.shape, generator=random) * NOISE * weight.float().std()
                weights[name] = (weight.float() + noise).to(weight.dtype)
        save_file(weights, file)
    return folder


def alone(prompt: GoldenPrompt) -> GoldenScore:
    """What the engine finds of a text with its continuation in this process."""
    file = VersionFile.model_validate({"label": "alone", "checkpoint": str(DEMO), **SETTINGS})
    version = open_torch(file, checkpoint=DEMO, progress=lambda share: None, threads=1)

    def logprobs(text: object) -> list[float]:
        ids = version.tokenizer.encode(str(text))
        version.backend.add(EngineRequest(str(text), ids, SamplingParams(max_tokens=1, prompt_logprobs=0)))
        told: list[Any] = []
        while version.backend.has_work():
            for output in version.backend.step():
                told += [next(iter(position.values())) for position in output.prompt_logprobs or [] if position]
        return [token.logprob for token in told]

    before, whole = logprobs(prompt.before), logprobs(prompt.whole)
    return GoldenScore(sum(whole) - sum(before), (), len(whole) - len(before))


def begin(server: RunningServer, version: int) -> None:
    with operation(server.home, server.service.name, tell=lambda _: None) as op:
        start(op, version, read_plan(None, PLAN))


def wait_golden(server: RunningServer) -> dict[str, Any]:
    """The rollout once golden prompts have a verdict in it."""

    def look() -> dict[str, Any] | None:
        told = status(server.service)
        known = told["judgement"] and told["judgement"]["metrics"]["golden_logprob"]["pairs"]
        return told if known else None

    return wait_for(look, 120, f"the golden prompts; the rollout is {status(server.service)}")


def test_scores_are_those_of_the_engine(server: RunningServer) -> None:
    found = compare(server.service, 3, 1, NOTHING_ENDS)
    assert found.problem == ""
    assert len(found.canary) == len(BUILT_IN)
    assert found.same_tokens
    assert found.unit == "nats a token"
    assert found.drops() == pytest.approx([0.0] * len(BUILT_IN), abs=1e-3)
    for number in (0, len(BUILT_IN) - 1):
        expected = alone(BUILT_IN[number])
        assert found.stable[number].tokens == expected.tokens
        assert found.stable[number].logprob == pytest.approx(expected.logprob, abs=1e-2)


def test_a_canary_with_wrong_weights_is_aborted_without_a_request(server: RunningServer) -> None:
    begin(server, 2)
    wait_for(lambda: status(server.service)["phase"] == "aborted", 120, "the abort")
    told = status(server.service)
    metric = told["judgement"]["metrics"]["golden_logprob"]
    assert metric["verdict"] == "fail"
    assert metric["pairs"] == len(BUILT_IN)
    assert metric["difference"] > 1.0
    assert (
        f"golden_logprob: {metric['canary']:.4f} nats a token against {metric['stable']:.4f} over 16 golden prompts"
        in told["reason"]
    )
    assert told["applied"] is False
    assert load_policy(server.service).canary is None
    audited = [json.loads(line)["to"] for line in server.service.audit_log.read_text().splitlines()]
    assert any(line.get("metrics", {}).get("golden_logprob", {}).get("verdict") == "fail" for line in audited)


def test_an_equal_canary_passes_and_is_told(server: RunningServer) -> None:
    begin(server, 3)
    told = wait_golden(server)
    metric = told["judgement"]["metrics"]["golden_logprob"]
    assert (told["phase"], metric["verdict"]) == ("running", "pass")
    assert metric["difference"] == pytest.approx(0.0, abs=1e-3)
    shown = server.piccard("rollout", "status").stdout
    assert "golden_logprob   pass" in shown
    assert "over 16 golden prompts, less than 0.1 lower" in shown
    labels = {"metric": "golden_logprob", "version": "3"}
    wait_for(lambda: server.metric("piccard_rollout_verdict", verdict="pass", **labels) == 1.0, 60, "the metric")
    assert server.metric("piccard_rollout_verdict", verdict="fail", **labels) == 0.0
    for version in ("1", "3"):
        figure = server.metric("piccard_rollout_figure", metric="golden_logprob", version=version)
        assert figure == pytest.approx(metric["stable"], abs=1e-3)
    abort(server.service, "seen enough")
    wait_for(lambda: status(server.service)["phase"] == "aborted", 60, "the end")
    wait_for(lambda: server.metric("piccard_rollout_verdict", verdict="pass", **labels) == 0.0, 60, "no verdict")


def test_a_service_goes_by_its_own_prompts(server: RunningServer) -> None:
    """Texts and chats; what a version cannot answer is told with its number and reason."""
    lines: list[dict[str, Any]] = [
        {"text": f"def add_{number}(a, b):\n", "continuation": "    return a + b\n"} for number in range(4)
    ]
    for number in range(4):
        asked = {"role": "user", "content": f"What is {number} and {number}?"}
        lines.append({"messages": [asked], "continuation": f"It is {2 * number}."})
    server.service.golden_prompts.write_text("\n".join(json.dumps(line) for line in lines))
    try:
        assert len(compare(server.service, 3, 1, NOTHING_ENDS).canary) == 8
        long = {"text": "?" + "9?" * 4000, "continuation": " b"}
        server.service.golden_prompts.write_text("\n".join(json.dumps(line) for line in [*lines, long]))
        problem = compare(server.service, 3, 1, NOTHING_ENDS).problem
        assert problem.startswith("version 3 does not answer golden prompt 9: CONTEXT_LENGTH_EXCEEDED"), problem
        gone = compare(server.service, 9, 1, NOTHING_ENDS).problem
        assert gone.startswith("version 9 does not answer golden prompt 1: "), gone
        ended = threading.Event()
        ended.set()
        assert compare(server.service, 3, 1, ended).problem == "the golden prompts are not wanted any more"
    finally:
        server.service.golden_prompts.unlink()


def test_versions_with_other_tokenizers_are_compared_by_bytes(server: RunningServer) -> None:
    found = compare(server.service, 4, 1, NOTHING_ENDS)
    assert found.problem == ""
    assert not found.same_tokens
    assert found.unit == "bits a byte"
    canary, stable = found.means()
    assert canary < 0 > stable


def test_nobody_is_charged_and_no_request_is_logged(server: RunningServer) -> None:
    def lines() -> int:
        log = server.service.request_log
        return len(log.read_bytes().splitlines()) if log.exists() else 0

    before = lines(), server.metric("piccard_direct_unsigned_claims_total")
    assert compare(server.service, 3, 1, NOTHING_ENDS).problem == ""
    assert (lines(), server.metric("piccard_direct_unsigned_claims_total")) == before


def test_yaml_of_the_plan_may_leave_them_out_of_what_must_pass() -> None:
    rule = {"kind": "logprob", "budget": 0.05, "least": 1.0, "margin": 2.0, "proved_from": 2.0}
    plan = read_plan(None, yaml.safe_load(yaml.safe_dump({"metrics": {"golden_logprob": rule}})))
    assert plan.metrics["golden_logprob"].proved_from == 2.0
