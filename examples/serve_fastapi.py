"""Serve a small classifier of scikit-learn's handwritten digits with FastAPI, under a castwise plan.

    python examples/serve_fastapi.py --plan bf16-mixed --port 8000
    curl -X POST localhost:8000/predict -H 'content-type: application/json' -d '{"images": [[0, 0, 5, ...]]}'

The only lines for castwise are those with ``amp``. The weights are cast once, so the server holds no fp32 copy of them.
Requests run in FastAPI's threads; a model under a plan can be called from several threads at once.
"""

import argparse

import torch
import torch.nn.functional as F
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sklearn.datasets import load_digits
from torch import nn

import castwise


class Request(BaseModel):
    """Images of 8 x 8 pixels with values from 0 to 16, as lists of 64 numbers."""

    images: list[list[float]]


class Answer(BaseModel):
    """The most likely digit for each image, and its probability."""

    digits: list[int]
    probabilities: list[float]


def trained():
    """Train the classifier in fp32 for a few seconds. A server loads its weights here instead."""
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(images / 16), labels).backward()
        optimizer.step()
    return model.eval()


def app_for(model, plan, device="cpu"):
    """Prepare a model for inference and return the server's application."""
    amp = castwise.Amp(plan, device=device)
    amp.prepare(model.to(device), inference=True)
    app = FastAPI()

    @app.post("/predict")
    def predict(request: Request) -> Answer:
        try:
            images = torch.tensor(request.images).reshape(-1, 64)
        except (ValueError, RuntimeError) as error:
            raise HTTPException(422, f"images: {error}") from None
        with torch.inference_mode():
            found = model(images.to(device) / 16).softmax(dim=-1).max(dim=-1)
        return Answer(digits=found.indices.tolist(), probabilities=found.values.tolist())

    @app.get("/plan")
    def shown() -> dict[str, str]:
        return {"plan": str(amp.plan), "summary": amp.summary()}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--plan", default="bf16-mixed", help="a preset, a plan's line or the path of a plan file"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(app_for(trained(), given.plan, given.device), port=given.port, log_level="warning")
