"""`harnessed doctor`: what it says, and its exit status."""

from command import harnessed
from policies import TEMPLATE, make_policy

MOVING = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + TEMPLATE.replace(
    "<|im_end|>\n", "<|im_end|>{{ loop.index }}\n"
)
"""What stands after an answer depends on how many messages came before."""


def test_a_sound_template(tmp_path):
    done = harnessed("doctor", "--model", make_policy(tmp_path / "policy"))
    assert done.returncode == 0, done.stderr
    assert "stop tokens: <|im_end|>" in done.stdout
    assert "259 tokens; context: 4096 tokens" in done.stdout
    assert "broken" not in done.stdout


def test_a_template_that_does_not_go_on_in_one_way(tmp_path):
    done = harnessed("doctor", "--model", make_policy(tmp_path / "policy", MOVING))
    assert done.returncode == 1, done.stderr
    assert "broken" in done.stdout


def test_no_policy(tmp_path):
    done = harnessed("doctor", "--model", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "there is no folder" in done.stderr
