"""Whole runs of `harnessed train`: real services and trainer, a tiny random policy, a small agent."""

import json
import shutil
import signal
import sqlite3
import time

import numpy as np
import pyarrow.parquet as parquet
import pytest
import yaml
from command import harnessed, make_config, processes_of, start, wait_for

from harnessed.client import Transcript
from harnessed.gateway.recording import load_transcripts
from harnessed.records import Fate, Outcome


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run of two steps in which agents fail in every way; its folder and what it printed."""
    folder = tmp_path_factory.mktemp("train")
    run = folder / "run"
    result = harnessed("train", make_config(folder), f"run.folder={run}", "controller.keep_folders=all")
    assert result.returncode == 0, result.stdout + result.stderr
    return run, result.stdout


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def stored_transcripts(run, label: str) -> list[list[Transcript]]:
    """All groups whose id contains the label, from the run's database."""
    from sqlalchemy import create_engine, text

    with create_engine(f"sqlite:///{run / 'gateway.db'}").connect() as connection:
        groups = connection.execute(text("select id from groups where id like :label"), {"label": f"%{label}%"})
        return [load_transcripts(connection, group) for group in groups.scalars().all()]


def test_the_summary_has_its_fields_and_the_books_balance(finished_run):
    run, _ = finished_run
    summary = json.loads((run / "summary.json").read_text())
    whole = "steps rollouts calls sampled_tokens trained_tokens seed"
    assert all(isinstance(summary[name], int) for name in whole.split())
    assert all(0 <= summary[name] <= 1 for name in ("held_out_before", "held_out_after"))
    assert summary["seconds"] > 0
    assert summary["steps"] == 2
    assert summary["rollouts"] == 2 * 15 + 2 * 6
    assert sum(summary["fates"].values()) == summary["sampled_tokens"] == summary["engine_sampled_tokens"]
    assert summary["fates"]["trained"] == summary["trained_tokens"] > 0


def test_rollouts_that_go_wrong_are_recorded_with_outcome_and_reason_and_the_run_goes_on(finished_run):
    run, printed = finished_run
    seen = {(line["outcome"], line["reason"]) for line in lines(run / "transcripts.jsonl") if line["step"]}
    outcomes = {outcome for outcome, _ in seen}
    assert outcomes == {Outcome.OK, Outcome.AGENT_EXIT, Outcome.AGENT_TIMEOUT, Outcome.INFRASTRUCTURE}
    assert any("status 1" in reason for outcome, reason in seen if outcome == Outcome.AGENT_EXIT), seen
    assert any("3 s" in reason for outcome, reason in seen if outcome == Outcome.AGENT_TIMEOUT), seen
    assert any("the judge broke" in reason for outcome, reason in seen if outcome == Outcome.INFRASTRUCTURE), seen
    assert "rollouts went wrong" in printed


def test_in_groups_that_were_taken_every_delivered_token_of_the_last_attempts_is_trained(finished_run):
    run, _ = finished_run
    trained = {line["rollout"]: line["fates"].get(Fate.TRAINED, 0) for line in lines(run / "transcripts.jsonl")}
    taken = 0
    for group in stored_transcripts(run, ".train."):
        if any(trained[transcript.rollout.id] for transcript in group):
            taken += 1
            for transcript in group:
                delivered = sum(node.sampled for node in transcript.attempts[-1].nodes if node.delivered)
                assert trained[transcript.rollout.id] == delivered
    assert taken > 0


def test_the_trainer_computes_what_the_engine_sampled_from(finished_run):
    """With unchanged weights both see the same distribution: the contexts are the same tokens."""
    run, _ = finished_run
    first = next(line for line in lines(run / "metrics.jsonl") if line.get("update_applied"))
    assert first["logprob_difference"] < 1e-4
    assert first["importance_weight"] == pytest.approx(1, abs=1e-3)


def test_versions_are_stamped_by_the_engine_after_each_update(finished_run):
    run, _ = finished_run
    steps = [line for line in lines(run / "metrics.jsonl") if "reward_mean" in line]
    for step, line in enumerate(steps, 1):
        for number in range(5 * (step - 1), 5 * step):
            (group,) = stored_transcripts(run, f"train.{number:06d}")
            for transcript in group:
                for node in transcript.attempts[-1].nodes:
                    sampled_by = set(np.frombuffer(node.versions, np.int32).tolist())
                    assert sampled_by == {line["version"][1] - line["update_applied"]}


def test_a_checkpoint_is_a_policy_again_and_names_the_groups_it_consumed(finished_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = finished_run
    folder = run / json.loads((run / "summary.json").read_text())["checkpoint"]
    notes = json.loads((folder / "harnessed.json").read_text())
    assert (notes["step"], len(notes["groups"])) == (2, 10)
    model = AutoModelForCausalLM.from_pretrained(folder)
    start = AutoModelForCausalLM.from_pretrained(run.parent / "policy")
    differences = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert max(differences) > 0
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert (folder / "model.safetensors").stat().st_size < 1.2 * sum(4 * p.numel() for p in model.parameters())


def test_a_person_can_read_the_conversations(finished_run):
    run, _ = finished_run
    line = next(line for line in lines(run / "transcripts.jsonl") if line["outcome"] == Outcome.OK)
    (conversation,) = line["conversations"]
    assert [message["role"] for message in conversation] == ["user", "assistant", "user", "assistant"]
    assert line["attempts"] == 1


def test_hidden_fields_stay_out_of_the_agents_reach(finished_run):
    run, _ = finished_run
    kept = [path for path in (run / "attempts").rglob("*") if path.is_file()]
    assert kept
    assert not any(b"hidden" in path.read_bytes() for path in kept)


def test_nothing_runs_on_after_a_run(finished_run):
    run, _ = finished_run
    assert processes_of(run.parent) == {}


def test_the_folder_of_a_run_is_not_written_twice(finished_run):
    run, _ = finished_run
    result = harnessed("train", run.parent / "config.yaml", f"run.folder={run}")
    assert result.returncode == 2
    assert "is not empty" in result.stderr


def test_a_checkpoint_can_be_evaluated(finished_run):
    run, _ = finished_run
    checkpoint = run / json.loads((run / "summary.json").read_text())["checkpoint"]
    result = harnessed(
        "eval", run.parent / "config.yaml", f"run.folder={run.parent / 'eval'}", f"policy.model={checkpoint}"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    evaluation = json.loads((run.parent / "eval" / "evaluation.json").read_text())
    assert evaluation["rollouts"] == 4
    low, high = evaluation["interval"]
    assert 0 <= low <= evaluation["success"] <= high <= 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_run_that_is_ended_leaves_no_process_and_a_whole_checkpoint(tmp_path, how):
    run = tmp_path / "run"
    config = make_config(tmp_path, trainer={"steps": 1000}, tasks={"train": "agent:easy_tasks"})
    process = start("train", config, f"run.folder={run}", "evaluation.tasks=1", "evaluation.greedy_tasks=0")
    try:
        wait_for(lambda: any((run / "checkpoints").glob("step-*")), "the first checkpoint")
        began = time.monotonic()
        process.send_signal(how)
        output = process.communicate(timeout=20)[0].decode()
        ended = time.monotonic()
        wait_for(lambda: processes_of(tmp_path) == {}, "the last process to end", limit_s=10)
        assert time.monotonic() - began < 15  # about 10 s are promised; the machine may be busy
    finally:
        process.kill()
    assert ended - began < 15
    for checkpoint in (run / "checkpoints").glob("step-*"):
        from safetensors import safe_open

        with safe_open(checkpoint / "model.safetensors", "np") as weights:
            assert len(list(weights.keys())) > 10
        assert json.loads((checkpoint / "harnessed.json").read_text())["groups"]
    if how != signal.SIGKILL:
        assert process.returncode == 130, output
        summary = json.loads((run / "summary.json").read_text())
        assert summary["interrupted"]
        assert sum(summary["fates"].values()) == summary["sampled_tokens"]
        assert "Traceback" not in output


def test_the_database_is_sound(finished_run):
    run, _ = finished_run
    with sqlite3.connect(run / "gateway.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        assert database.execute("select count(*) from calls where state != 'answered'").fetchone() == (0,)


def test_the_dashboard_has_the_curves_and_fates_that_the_folder_has(finished_run):
    run, printed = finished_run
    with sqlite3.connect(run / "gateway.db") as database:
        posted = [json.loads(values) for (values,) in database.execute('select "values" from metrics order by number')]
        fates = {rollout: json.loads(tokens) for rollout, tokens in database.execute("select * from fates")}
    assert posted == lines(run / "metrics.jsonl")
    assert fates == {line["rollout"]: line["fates"] for line in lines(run / "transcripts.jsonl")}
    assert "dashboard: http" in printed and printed.count("dashboard") == 1  # nothing failed to be posted


def test_the_configuration_that_was_used_is_kept(finished_run):
    run, _ = finished_run
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["groups_per_step"] == 5


def test_people_can_look_into_the_records(finished_run, tmp_path):
    run, _ = finished_run
    listed = harnessed("rollouts", "list", run).stdout
    assert listed.count("agent_exit") == 2 * 3
    assert "the judge broke" in listed
    shown = harnessed("rollouts", "show", run, "train.000000.0").stdout
    assert "user: task 0.0" in shown
    assert "#2 (after #1, length)" in shown or "#2 (after #1, stop)" in shown
    tokens = harnessed("rollouts", "show", run, "train.000000.0", "--tokens").stdout
    assert "<|im_start|>user\ntask 0.0<|im_end|>" in tokens
    logs = harnessed("rollouts", "logs", run, "train.000001.0").stdout
    assert "the agent broke" in logs
    out = tmp_path / "rows.jsonl"
    assert harnessed("rollouts", "export", run, out).returncode == 0
    rows = lines(out)
    assert len({row["rollout"] for row in rows}) == len(rows) > 0
    assert all(len(row["tokens"]) == len(row["trained"]) == len(row["logprobs"]) for row in rows)
    table = tmp_path / "rows.parquet"
    assert harnessed("rollouts", "export", run, table).returncode == 0
    columns = parquet.read_table(table).to_pydict()
    assert columns["tokens"] == [row["tokens"] for row in rows]
    assert columns["trained"] == [[bool(value) for value in row["trained"]] for row in rows]
    assert "must end in .jsonl or .parquet" in harnessed("rollouts", "export", run, tmp_path / "rows.csv").stderr
    assert harnessed("rollouts", "list", run.parent).returncode == 2


def test_an_ended_run_is_pruned_and_its_endings_stay(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run[0], run)
    assert "pruned 0 rollouts" in harnessed("rollouts", "prune", run).stdout
    listed = harnessed("rollouts", "list", run).stdout
    assert "pruned 42 rollouts" in harnessed("rollouts", "prune", run, "--older-than", "0").stdout
    assert harnessed("rollouts", "list", run).stdout == listed
    assert "or pruned" in harnessed("rollouts", "show", run, "train.000000.0").stdout
    assert "pruned 0 rollouts" in harnessed("rollouts", "prune", run, "--older-than", "0").stdout
    (run / "summary.json").unlink()
    assert "has not ended" in harnessed("rollouts", "prune", run).stderr


def test_a_dry_run_shows_the_rows_of_one_rollout(tmp_path):
    run = tmp_path / "dry"
    done = harnessed("train", "--dry-run", make_config(tmp_path), f"run.folder={run}", "trainer.row_tokens=30")
    assert done.returncode == 0, done.stderr
    assert "fates: trained" in done.stdout and "overlong" in done.stdout
    assert "row 1 of 1: 30 tokens" in done.stdout
    assert "assistant\n[[" in done.stdout
    assert not (run / "checkpoints").exists() and not (run / "policy").exists()
