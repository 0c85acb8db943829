"""Train a small byte-level GPT-2 on Python's own documentation with the Trainer of transformers, under a castwise plan.

python examples/huggingface_trainer.py --plan fp16-mixed
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from castwise.integrations.huggingface import CastwiseTrainer

LENGTH = 64
"""Number of bytes in a text."""


def texts() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return the texts for training and for evaluation: pieces of the documentation, with one token per byte."""
    data = torch.tensor(list("\n".join(topics[key] for key in sorted(topics)).encode()))
    pieces = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    return rows[:-128], rows[-128:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--plan",
        default="bf16-mixed",
        help="a preset, a plan as one line of text, or the path of a plan.json",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="huggingface_trainer", help="folder for checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last checkpoint in that folder"
    )
    given = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
            loss_type="ForCausalLM",
        )
    )  # fmt: skip
    train, evaluate = texts()
    trainer = CastwiseTrainer(
        model=model,
        plan=given.plan,
        args=TrainingArguments(
            output_dir=given.output,
            max_steps=given.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=max(given.steps // 10, 1),
            max_grad_norm=1.0,
            logging_steps=max(given.steps // 10, 1),
            save_steps=max(given.steps // 2, 1),
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=train,
        eval_dataset=evaluate,
    )
    trainer.train(resume_from_checkpoint=given.resume or None)
    print(
        f"{trainer.accelerator.amp.plan}: loss {trainer.evaluate()['eval_loss']:.3f} on text that was not used in training"
    )


if __name__ == "__main__":
    main()
