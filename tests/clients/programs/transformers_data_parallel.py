"""transformers' Trainer where it finds two devices: it wraps by nn.DataParallel itself.

Trains the same model on the same batches plainly and wrapped, and prints how.
"""

import argparse
import os

os.environ["PACELINE_CPU_REPLICAS"] = "2"

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

N_WORDS, LENGTH, N_ROWS = 50, 12, 8


def sentences(n):
    generator = torch.Generator().manual_seed(n)
    words = torch.randint(0, N_WORDS, (n, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in words]


def train(out, n_devices):
    set_seed(7)
    config = GPT2Config(
        vocab_size=N_WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    options = TrainingArguments(
        output_dir=out,
        use_cpu=True,
        per_device_train_batch_size=N_ROWS // n_devices,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        max_steps=4,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    options._n_gpu = n_devices  # as where torch finds two GPUs
    trainer = Trainer(
        model=GPT2LMHeadModel(config).double(),
        args=options,
        train_dataset=sentences(96),
    )
    trainer.train()
    wrapped = trainer.model_wrapped
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return wrapped, losses, list(trainer.model.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    (_, theirs, weights), (wrapped, mine, own) = train(out, 1), train(out, 2)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own, weights, rtol=1e-6, atol=1e-6)
    print("alike by", type(wrapped).__module__, len(wrapped.device_ids))


if __name__ == "__main__":
    main()
