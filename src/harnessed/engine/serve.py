"""The engine's process: load the model, wait for the shared weights, serve until SIGTERM.

Started by the command line with a socket that listens already, so that clients may connect before the model is loaded;
they are answered once it is.
"""

import socket
import time
from pathlib import Path
from typing import Any

import torch
import uvicorn
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harnessed.config import EngineSettings
from harnessed.engine.app import make_app
from harnessed.engine.queue import Queue
from harnessed.weights import SharedWeights, read_state

POLL_S = 0.05
END_S = 1
"""How long running requests have to end after SIGTERM."""
KEEP_ALIVE_S = 3600
"""Longer than any client keeps an unused connection, so that none is closed in the moment in which it is used again."""


class StartError(Exception):
    """The engine cannot start; the text says what to change."""


def serve(listening: socket.socket, model: Path, weights: Path | None, settings: EngineSettings) -> None:
    """Serve the model in a folder, with its own weights as version 0.0 or with those that a trainer shares.

    Returns, or ends the process by the signal, after SIGTERM or SIGINT. Raises StartError, and WeightsError if the
    shared weights are another model's.
    """
    torch.set_num_threads(settings.threads)
    policy = _load(model)
    shared = None
    if weights is not None:
        _wait_for(weights, settings.start_limit_s)
        shared = SharedWeights.open(weights, policy)
    config = policy.config.get_text_config()
    queue = Queue(policy, shared, settings.batch, settings.threads, settings.cache_mb * 2**20)
    file = model / "tokenizer.json"
    app = make_app(
        queue,
        model.name,
        policy.get_input_embeddings().num_embeddings,
        config.max_position_embeddings,
        Tokenizer.from_file(str(file)) if file.is_file() else None,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=END_S,
        )
    )
    server.run(sockets=[listening])


def _load(folder: Path) -> Any:
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise StartError(f"cannot load the model in {folder}: {error}") from error
    return model.eval().requires_grad_(False)


def _wait_for(weights: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while read_state(weights) is None:
        if time.monotonic() > deadline:
            raise StartError(
                f"no weights after {limit_s:g} s: the engine waits for {weights / 'state.json'}, which the trainer "
                "writes when it has loaded its model; look at the trainer's log, or raise engine.start_limit_s"
            )
        time.sleep(POLL_S)
