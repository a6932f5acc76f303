"""Libraries that derive from torch's wrappers, or take them, train as they should.

They are imported while Paceline is installed, so that their classes derive from ours.
Each is compared with the plain module, or with itself over torch's class.
"""

from __future__ import annotations

import copy
import warnings

import paceline
import pytest
import torch
from support.clients import needs
from torch import nn

TWO = ["cpu", "cpu"]


@pytest.fixture
def _installed(monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_REPLICAS", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests have imported torch's classes
        paceline.install()
        yield
        paceline.uninstall()


def net(n_in: int = 6, n_out: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))


# ---- gpytorch: a wrapper that is a kernel, too ---------------------------------------


def fit(gpytorch, kernel, x, y):
    """Return the losses of a Gaussian process, its predictions, and its parameters."""

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = kernel

        def forward(self, x):
            mean, covariance = self.mean(x), self.kernel(x)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    model = Model().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    score = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = -score(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    predicted = model.eval()(x[:5] + 0.1).mean
    return [
        torch.stack(losses),
        predicted.detach(),
        *map(torch.clone, kernel.buffers()),
    ]


@pytest.mark.usefixtures("_installed")
@needs("gpytorch")
def test_a_kernel_of_gpytorch_on_several_devices_fits_as_on_one():
    import gpytorch

    torch.manual_seed(2)
    x = torch.rand(20, 2, dtype=torch.float64)
    kernels = gpytorch.kernels
    made = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2))
    several = kernels.MultiDeviceKernel(copy.deepcopy(made), TWO)
    assert isinstance(several, paceline.DataParallel)
    assert several.has_lengthscale is False  # the kernel is constructed, too
    plain, ours = (fit(gpytorch, k, x, x.sum(1).sin()) for k in (made, several))
    torch.testing.assert_close(ours[:2], plain[:2])
    for p, q in zip(several.base_kernel.parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ---- PyTorch Geometric: a scatter for lists of graphs --------------------------------


@pytest.mark.usefixtures("_installed")
@needs("torch_geometric")
@pytest.mark.filterwarnings("ignore:'DataParallel' is usually much slower")
def test_a_list_of_graphs_of_pytorch_geometric_trains_as_one_batch(monkeypatch):
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import DataParallel, GINConv, global_add_pool

    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = GINConv(net(6, 4)), nn.Linear(4, 2)

        def forward(self, data):
            x = self.layer(data.x, data.edge_index).relu()
            return self.last(global_add_pool(x, data.batch))

    torch.manual_seed(1)
    sizes = (3, 5, 4, 2, 6)
    graphs = [
        Data(x=torch.randn(n, 6), edge_index=torch.randint(n, (2, 2 * n)))
        for n in sizes
    ]
    plain = Graphs()
    ours = DataParallel(copy.deepcopy(plain))
    assert isinstance(ours, paceline.DataParallel)
    assert ours.src_device == torch.device("cuda:0")  # made of device_ids[0]
    with pytest.raises(RuntimeError, match="on device 'cuda:0' but found one of them"):
        ours(graphs)
    # Two lines of the library name a GPU.
    ours.src_device = ours.src_device_obj
    monkeypatch.setattr(Data, "to", lambda batch, device: batch)
    outs = [plain(Batch.from_data_list(graphs)), ours(graphs)]
    torch.testing.assert_close(outs[1], outs[0])
    for out in outs:
        out.square().sum().backward()
    for p, q in zip(ours.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# ---- skorch: an estimator round a wrapper --------------------------------------------


@pytest.mark.usefixtures("_installed")
@needs("skorch")
@pytest.mark.parametrize("is_instance", [True, False])
def test_an_estimator_of_skorch_fits_and_predicts_as_with_the_plain_module(is_instance):
    from skorch import NeuralNetClassifier

    def estimate(module, **options):
        torch.manual_seed(4)
        estimator = NeuralNetClassifier(
            module,
            max_epochs=3,
            lr=0.1,
            batch_size=16,
            criterion=nn.CrossEntropyLoss,
            train_split=None,
            iterator_train__shuffle=True,
            verbose=0,
            **options,
        )
        estimator.fit(x.numpy(), labels.numpy())
        losses = torch.tensor(estimator.history[:, "train_loss"])
        return losses, torch.tensor(estimator.predict_proba(x.numpy()))

    torch.manual_seed(5)
    x, labels = torch.randn(50, 6), torch.randint(3, (50,))
    plain = estimate(net())
    kind = nn.DataParallel
    ours = (
        estimate(kind(net()))
        if is_instance
        else estimate(kind, module__module=net(), module__device_ids=[0, 1])
    )
    torch.testing.assert_close(ours, plain)
