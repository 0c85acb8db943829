"""The server of ``examples/serve_fastapi.py``: 50 requests at once, over sockets."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.cpu  # the example's default device
SCRIPT = Path(__file__).parents[3] / "examples" / "serve_fastapi.py"
PLANS = ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_fastapi", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serving() -> Iterator[Callable[[Any], str]]:
    """Run an application on a free port in a thread, and return its address."""
    servers: list[tuple[Any, threading.Thread]] = []

    def start(app: Any) -> str:
        server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def post(url: str, images: Any) -> dict[str, Any]:
    body = json.dumps({"images": images}).encode()
    request = urllib.request.Request(f"{url}/predict", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_fifty_requests_at_once_get_what_each_gets_alone(
    plan: str, example: ModuleType, serving: Callable[[Any], str]
) -> None:
    model = example.trained()
    images = [image.tolist() for image in torch.tensor(example.load_digits().data[:200]).split(4)]
    url = serving(example.app_for(model, plan))
    alone = [post(url, one) for one in images[:5]]
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda one: post(url, one), images))
    assert len(found) == 50
    assert found[:5] == alone
    labels = example.load_digits().target[:200].tolist()
    digits = [digit for one in found for digit in one["digits"]]
    right = sum(a == b for a, b in zip(digits, labels, strict=True))
    assert right > 180
    with urllib.request.urlopen(f"{url}/plan", timeout=60) as answer:
        assert json.load(answer)["plan"] == plan


def test_a_bad_image_is_refused_and_the_server_goes_on(
    example: ModuleType, serving: Callable[[Any], str]
) -> None:
    url = serving(example.app_for(example.trained(), "bf16-mixed"))
    for bad in ([[1.0, 2.0]], [["x"]], [[1.0], [2.0, 3.0]]):
        with pytest.raises(urllib.error.HTTPError, match="422"):
            post(url, bad)
    assert len(post(url, [[0.0] * 64])["digits"]) == 1
