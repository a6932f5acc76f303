"""Models of transformers on two CPU replicas, beside the plain module.

Tiny configurations with random weights: nothing is downloaded.  Losses are computed of
the outputs, over all rows, so that they are the plain module's; sums are taken in
another order, so what is compared may differ in the last bits (float64, 1e-12).
"""

import pytest
import torch
import torch.nn.functional as F
from replicas import RELATIVE, Twin, assert_close, integers
from support.clients import transformers_or_skip

transformers = transformers_or_skip()

N_WORDS, N_STEPS = 31, 2
SMALL = {
    "vocab_size": N_WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
BY_HEADS = {**SMALL, "num_key_value_heads": 1}


@pytest.fixture
def wrap(wrap_on_cpu):
    return wrap_on_cpu


def make(kind, config, **options):
    torch.manual_seed(0)
    config = getattr(transformers, config)(**options)
    return getattr(transformers, kind)(config).double()


def gpt2():
    return make(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=N_WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def llama():
    return make("LlamaForCausalLM", "LlamaConfig", **BY_HEADS)


def mixtral():
    return make(
        "MixtralForCausalLM",
        "MixtralConfig",
        **BY_HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation="eager",
    )


def bert():
    return make(
        "BertForMaskedLM",
        "BertConfig",
        **SMALL,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )


def sentences(step, rows=5):
    return integers(rows, 7, seed=step, low=0, high=N_WORDS - 1, dtype=torch.int64)


def loss_of(out, words):
    """Return a loss of all that an output has of gradients, over all rows."""
    loss = F.cross_entropy(out.logits.flatten(0, 1), words.flatten())
    for name in ("hidden_states", "attentions", "router_logits"):
        for number, tensor in enumerate(getattr(out, name, None) or ()):
            loss = loss + (number + 1) * tensor.square().mean()
    return loss


def compare(mine, theirs, what):
    """Compare outputs, but for caches and for means that replicas take themselves."""
    assert type(mine) is type(theirs)
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            assert_close(mine[name], value, f"{what} {name}", exact=False)
        elif isinstance(value, tuple):
            assert len(mine[name]) == len(value)
            for pair in zip(mine[name], value, strict=True):
                assert_close(*pair, f"{what} {name}", exact=False)


def assert_same_training(twin):
    """Compare gradients and weights, by the scale of the largest of them.

    Some are 0 but for rounding, and have none: to a key's bias softmax is blind.
    """
    pairs = list(zip(twin.inner.parameters(), twin.plain.parameters(), strict=True))
    assert all((p.grad is None) == (q.grad is None) for p, q in pairs)
    grads = [(p.grad, q.grad) for p, q in pairs if q.grad is not None]
    for tensors in (pairs, grads):
        largest = max(float(theirs.detach().abs().max()) for _, theirs in tensors)
        for mine, theirs in tensors:
            assert float((mine - theirs).detach().abs().max()) <= RELATIVE * largest
    for mine, theirs in zip(twin.inner.buffers(), twin.plain.buffers(), strict=True):
        assert_close(mine, theirs, "a buffer")


def train(twin, **options):
    """Take steps with both models; return the last outputs, the plain one first."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in twin.models]
    for step in range(N_STEPS):
        words, losses, outputs = sentences(step), [], []
        twin.zero()
        for model in twin.models:
            outputs.append(model(input_ids=words, **options))
            losses.append(loss_of(outputs[-1], words))
            losses[-1].backward()
        compare(outputs[1], outputs[0], f"step {step}")
        assert_close(losses[1], losses[0], "loss", exact=False)
        assert_same_training(twin)
        for optimizer in optimizers:
            optimizer.step()
    return outputs


WITHOUT_CACHE = {"use_cache": False}
MODELS = {
    "Llama": (llama, WITHOUT_CACHE),
    "GPT-2 with hidden states": (gpt2, {"output_hidden_states": True, **WITHOUT_CACHE}),
    "Mixtral with the experts' logits": (mixtral, WITHOUT_CACHE),
    "BERT with attentions": (
        bert,
        {"output_hidden_states": True, "output_attentions": True},
    ),
}


@pytest.mark.parametrize(("model", "options"), MODELS.values(), ids=list(MODELS))
def test_models_train_as_the_plain_module(wrap, model, options):
    train(Twin(wrap, model()), **options)


@pytest.mark.parametrize("model", [gpt2, llama])
def test_a_cache_in_the_output_is_one_a_replica(wrap, model):
    twin = Twin(wrap, model())
    theirs, mine = train(twin, use_cache=True)
    caches = mine.past_key_values
    for number, layer in enumerate(theirs.past_key_values.layers):
        keys = torch.cat([cache.layers[number].keys for cache in caches])
        assert_close(keys, layer.keys, "keys", exact=False)


def test_the_auxiliary_loss_of_experts_is_one_a_replica(wrap):
    """As any mean that a forward takes over its rows: of each replica's."""
    twin = Twin(wrap, mixtral())
    words = sentences(0, rows=4)
    mine = twin.ours(input_ids=words, labels=words, use_cache=False)
    halves = [
        twin.plain(input_ids=half, labels=half, use_cache=False)
        for half in words.chunk(2)
    ]
    for name in ("loss", "aux_loss"):
        theirs = torch.stack([half[name] for half in halves])
        assert_close(mine[name], theirs, name, exact=False)
    mine.loss.sum().backward()
    sum(half.loss for half in halves).backward()
    assert_same_training(twin)


def test_a_model_may_be_changed_between_steps(wrap):
    twin = Twin(wrap, llama())
    train(twin, use_cache=False)
    for module in (twin.plain, twin.inner):
        module.eval()
        module.resize_token_embeddings(N_WORDS + 3)
        module.get_input_embeddings().weight.data[N_WORDS:] = 0.5
        module.get_output_embeddings().weight.data[N_WORDS:] = 0.5
        next(module.parameters()).requires_grad_(False)
    train(twin, use_cache=False)
    for module in (twin.plain, twin.inner):
        module.train()
        module.gradient_checkpointing_enable()  # by a hook, in transformers 5
    train(twin, use_cache=False)
