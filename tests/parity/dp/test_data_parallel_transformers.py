"""Models of transformers on two CPU replicas, compared with the plain module.

Tiny configurations with random weights: nothing is downloaded.  Losses are computed
from the outputs, over all rows, so they are the plain module's.  Sums are taken in
another order, so results may differ in the last bits (float64, 1e-12).
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from replicas import Twin, assert_close, assert_same, integers
from support.clients import transformers_or_skip

transformers = transformers_or_skip()

N_WORDS, N_STEPS = 31, 2
SMALL = {
    "vocab_size": N_WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def make(kind, **options):
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    return made(made.config_class(**SMALL, **options)).double()


gpt2 = partial(
    make,
    "GPT2LMHeadModel",
    **{f"{place}_pdrop": 0.0 for place in ("resid", "embd", "attn")},
    bos_token_id=0,
    eos_token_id=0,
    attn_implementation="eager",
)
llama = partial(make, "LlamaForCausalLM", intermediate_size=24, num_key_value_heads=1)


def sentences(step, rows=5):
    return integers(rows, 7, seed=step, low=0, high=N_WORDS - 1, dtype=torch.int64)


def loss_of(out, words):
    """Return a loss of all differentiable parts of an output, over all rows."""
    loss = F.cross_entropy(out.logits.flatten(0, 1), words.flatten())
    for name in ("hidden_states", "attentions"):
        for number, tensor in enumerate(getattr(out, name, None) or ()):
            loss = loss + (number + 1) * tensor.square().mean()
    return loss


def by_row(out):
    """Return an output without caches: each replica has its own."""
    return type(out), {name: out[name] for name in out if name != "past_key_values"}


def joined(tensors):
    return torch.cat([t.detach().flatten() for t in tensors if t is not None])


def assert_same_training(twin):
    """Compare gradients and weights, relative to the largest of them."""
    plain, ours = [list(model.parameters()) for model in twin.models]
    assert_close(joined(ours), joined(plain), "weights", exact=False)
    grads = [joined(p.grad for p in each) for each in (ours, plain)]
    assert_close(*grads, "gradients", exact=False)
    assert_same(list(twin.inner.buffers()), list(twin.plain.buffers()))


def train(twin, **options):
    """Take steps with both models; return the last outputs, the plain one first."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in twin.models]
    for step in range(N_STEPS):
        words = sentences(step)
        twin.zero()
        outputs = [model(input_ids=words, **options) for model in twin.models]
        losses = [loss_of(out, words) for out in outputs]
        for loss in losses:
            loss.backward()
        assert_same(by_row(outputs[1]), by_row(outputs[0]), exact=False)
        assert_close(losses[1], losses[0], "loss", exact=False)
        assert_same_training(twin)
        for optimizer in optimizers:
            optimizer.step()
    return outputs


STATES = {"output_hidden_states": True, "output_attentions": True}
MODELS = {
    "Llama": (llama, {"use_cache": False}),
    "GPT-2 with states and attentions": (gpt2, {"use_cache": False, **STATES}),
}


@pytest.mark.parametrize(("model", "options"), MODELS.values(), ids=list(MODELS))
def test_models_train_as_the_plain_module(wrap, model, options):
    train(Twin(wrap, model()), **options)


def test_a_cache_in_the_output_is_one_a_replica(wrap):
    theirs, mine = train(Twin(wrap, llama()), use_cache=True)
    for number, layer in enumerate(theirs.past_key_values.layers):
        keys = [cache.layers[number].keys for cache in mine.past_key_values]
        assert_close(torch.cat(keys), layer.keys, "keys", exact=False)


def test_a_model_may_be_changed_between_steps(wrap):
    twin = Twin(wrap, llama())
    train(twin, use_cache=False)
    for module in (twin.plain, twin.inner):
        module.resize_token_embeddings(N_WORDS + 3)
        module.get_input_embeddings().weight.data[N_WORDS:] = 0.5
        module.get_output_embeddings().weight.data[N_WORDS:] = 0.5
        next(module.parameters()).requires_grad_(False)
        module.gradient_checkpointing_enable()  # by a hook, in transformers 5
    train(twin, use_cache=False)
