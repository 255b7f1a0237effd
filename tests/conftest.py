"""No test reaches the network; tests of the GPU are skipped where there is none; one model for all.

PCA_TORCH_TEST_DEVICE=cpu runs those tests of the GPU on the CPU that take their device from the fixture, as
`scripts/gpu_check --device cpu` does: so they are known to work.
"""

import os
import socket

import pytest
import torch

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
DEVICE = "PCA_TORCH_TEST_DEVICE"


def pytest_configure():
    os.environ.update(OFFLINE)  # before any import that reads them; child processes inherit them


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    named = DEVICE in os.environ
    for item in items:
        if item.get_closest_marker("gpu") and not (named and "device" in item.fixturenames):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device():
    """Where tests that are marked for a GPU run."""
    return torch.device(os.environ.get(DEVICE, "cuda"))


class BlockedSockets:
    """Refuses every way out and remembers who tried: the caller may swallow the refusal."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.attempts = []
        patch.setattr(socket, "getaddrinfo", self._refuse)
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, self._local_only(getattr(socket.socket, name)))

    def _refuse(self, *target, **options):
        self.attempts.append(target)
        raise PermissionError(f"a test may not use the network, this one tried {target}.")

    def _local_only(self, method):
        def guarded(sock, *args):
            return method(sock, *args) if sock.family == socket.AF_UNIX else self._refuse(*args)

        return guarded

    def take_attempts(self):
        """The attempts since the last call."""
        taken, self.attempts = self.attempts, []
        return taken


@pytest.fixture(scope="session", autouse=True)
def blocked_sockets():
    with pytest.MonkeyPatch.context() as patch:
        yield BlockedSockets(patch)


@pytest.fixture(autouse=True)
def no_network(blocked_sockets):
    yield
    attempts = blocked_sockets.take_attempts()
    if attempts:
        pytest.fail(f"the test tried to reach the network and hid the refusal: {attempts}")


@pytest.fixture(scope="session")
def smollm2():
    """The embedded language model, loaded once."""
    from pca_torch.models import load_model

    return load_model("smollm2")


@pytest.fixture(scope="session")
def local_model(tmp_path_factory):
    """A tiny random Llama in a folder, with a tokenizer of whole words, and a text of those words."""
    import json

    import numpy as np
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("model")
    words = [f"w{i}" for i in range(40)]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=42, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text(" ".join(rng.choice(words, 3000)))
    (folder / "docs.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(rng.choice(words, 50))}) + "\n" for _ in range(20))
    )
    return folder
