"""transformers' Trainer: accumulation, evaluation, both kinds of checkpoints.

With --replicas the Trainer finds two devices and wraps with nn.DataParallel itself.  It
trains the same model on the same batches plainly and wrapped, and prints the results.
"""

import argparse
import os

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

N_WORDS, LENGTH = 50, 12


def sentences(n):
    """Return sentences in which each word is the previous one plus one or two."""
    generator = torch.Generator().manual_seed(n)
    steps = torch.randint(1, 3, (n, LENGTH), generator=generator)
    words = steps.cumsum(1) % N_WORDS
    return [{"input_ids": row, "labels": row.clone()} for row in words]


def make_gpt(**options):
    set_seed(7)
    config = GPT2Config(
        vocab_size=N_WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return GPT2LMHeadModel(config)


class Tagger(nn.Module):
    """BERT, whose pooler does not contribute to the loss."""

    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=N_WORDS,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
        self.bert = BertModel(config)
        self.head = nn.Linear(32, N_WORDS)

    def forward(self, input_ids, labels):
        scores = self.head(self.bert(input_ids).last_hidden_state)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": scores}


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_eval_batch_size=4,
        learning_rate=0.01,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        **{
            "per_device_train_batch_size": 4,
            "save_strategy": "no",
            "max_steps": 4,
            **options,
        },
    )


def told_by(trainer):
    """Return the losses that a run logged, and the weights."""
    history = [
        {k: row[k] for k in ("loss", "grad_norm", "eval_loss") if k in row}
        for row in trainer.state.log_history
    ]
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"history": history, "weights": weights}


def train(out, resume):
    """Train, save halfway, evaluate; or resume from the halfway checkpoint."""
    options = arguments(
        f"{out}/run",
        max_steps=6,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        max_grad_norm=0.5,
    )
    trainer = Trainer(
        model=make_gpt(),
        args=options,
        train_dataset=sentences(96),
        eval_dataset=sentences(20),
    )
    trainer.train(resume_from_checkpoint=resume and f"{resume}/run/checkpoint-3")
    told = told_by(trainer)
    told["evaluated"] = trainer.evaluate()["eval_loss"]
    return told


def train_with_checkpointing(out, use_reentrant):
    options = arguments(
        f"{out}/run",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )
    trainer = Trainer(model=make_gpt(), args=options, train_dataset=sentences(32))
    trainer.train()
    return told_by(trainer)


def train_with_unused_parameters(out):
    set_seed(8)
    options = arguments(
        f"{out}/run", ddp_find_unused_parameters=True, ddp_bucket_cap_mb=1
    )
    trainer = Trainer(model=Tagger(), args=options, train_dataset=sentences(32))
    trainer.train()
    return told_by(trainer)


def train_on_devices(out, n_devices):
    """Return the Trainer's wrapper, its logged losses and its weights."""
    options = arguments(
        out, per_device_train_batch_size=8 // n_devices, gradient_accumulation_steps=2
    )
    options._n_gpu = n_devices  # as if torch found two GPUs
    model = make_gpt(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    trainer = Trainer(model=model, args=options, train_dataset=sentences(96))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return trainer.model_wrapped, [losses, list(trainer.model.parameters())]


def compare_replicas(out):
    os.environ["PACELINE_CPU_REPLICAS"] = "2"
    (_, theirs), (wrapped, mine) = (train_on_devices(out, n) for n in (1, 2))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    print("alike by", type(wrapped).__module__, len(wrapped.device_ids))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume")
    parser.add_argument("--replicas", action="store_true")
    args = parser.parse_args()
    if args.replicas:
        compare_replicas(args.out)
        return
    told = {"train": train(args.out, None)}
    if args.resume:
        told["resumed"] = train(args.out, args.resume)
    told["reentrant"] = train_with_checkpointing(args.out, True)
    told["not reentrant"] = train_with_checkpointing(args.out, False)
    told["unused"] = train_with_unused_parameters(args.out)
    torch.save(told, f"{args.out}/rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
