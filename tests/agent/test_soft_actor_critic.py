"""Tests of soft actor-critic and CrossQ: the squashed Gaussian, the critics, each equation on tiny nets, and invalid specs."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic, Temperature, target_entropies
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.net.q_nets import QCritic, SeparateCritics, StackedCritics, build_critics
from slm_lab.agent.ops.distributions import SquashedNormal
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import OptimizerGroup
from slm_lab.agent.replay.replay import Transitions
from slm_lab.lib.records import ActionSpace, EnvInfo, ObservationSpace
from slm_lab.spec.models.algorithm import SoftActorCriticSpec
from slm_lab.spec.models.net import ConvNetSpec, MLPNetSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.agent.helpers import CONTINUOUS, DISCRETE, MLP, Acting, ToyEnv, agent_of, drive, info

OBS = ObservationSpace((4,))
BRN: dict[str, Any] = {
    "name": "TorchArcNet",
    "critic_arc": {
        "modules": {
            "body": {"Sequential": [{"LazyBatchRenorm1d": {"warmup_steps": 10}}, {"LazyLinear": {"out_features": 8}}, {"ReLU": None}]}
        }
    },
    "optim_spec": {"name": "Adam", "lr": 0.01},
}
CONV = {"name": "ConvNet", "conv_hid_layers": [[4, 3, 2]], "fc_hid_layers": [8], "optim_spec": {"name": "Adam", "lr": 0.01}}


def sac_spec(
    net: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
    critic_net: dict[str, Any] | None = None,
    num_envs: int = 3,
    **algorithm: Any,
) -> Spec:
    algorithm = {"name": "SoftActorCritic", "training_start_step": 0, **algorithm}
    if algorithm["name"] == "CrossQ" and critic_net is None:
        critic_net = BRN
    agent = {
        "algorithm": algorithm,
        "memory": memory or {"name": "Replay", "batch_size": 8, "max_size": 500},
        "net": net or MLP,
        "critic_net": critic_net,
    }
    env = {"name": "Toy-v0", "num_envs": num_envs, "max_frame": 1000}
    return Spec.model_validate({"name": "toy", "agent": agent, "env": env})


def build(action: ActionSpace = CONTINUOUS, shape: tuple[int, ...] = (4,), dtype: Any = "float32", **kwargs: Any) -> tuple[Agent, ToyEnv]:
    env_info = EnvInfo(3, ObservationSpace(shape, dtype), action, max_frame=1000)
    return agent_of(sac_spec(**kwargs), env_info), ToyEnv(env_info)


def algorithm_of(agent: Agent) -> SoftActorCritic:
    assert isinstance(agent.algorithm, SoftActorCritic)
    return agent.algorithm


def transitions(action_B: Tensor, seed: int = 0, weight_B: Tensor | None = None, logp_B: Tensor | None = None) -> Transitions:
    """Return random transitions, of which the odd rows terminate."""
    rng = torch.Generator().manual_seed(seed)
    B = len(action_B)
    terminated_B = (torch.arange(B) % 2).float()
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    logp_B = draw(B) if logp_B is None else logp_B
    return Transitions(draw(B, 4), action_B, logp_B, draw(B), draw(B, 4), terminated_B, weight_B, np.arange(B))


class Scripted:
    """Random generator that returns given normal numbers."""

    def __init__(self, *noise: np.ndarray) -> None:
        self.noise = [item.astype(np.float32) for item in noise]

    def standard_normal(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        noise = self.noise.pop(0)
        assert noise.shape == shape
        return noise


# the squashed Gaussian


def test_log_prob_is_the_change_of_variables() -> None:
    distribution = SquashedNormal(CONTINUOUS)
    rng = torch.Generator().manual_seed(0)
    params, noise = torch.randn(64, 4, generator=rng).clamp(max=1.5), torch.randn(64, 2, generator=rng)
    action, logp, *_ = distribution.rsample(params, noise)
    loc, std = params[:, :2].double(), params[:, 2:].double().exp()
    u = loc + std * noise.double()
    expected = (torch.distributions.Normal(loc, std).log_prob(u) - torch.log(1.0 - torch.tanh(u) ** 2)).sum(1)
    near = u.abs().amax(1) < 3.0  # beyond 3 the textbook form of the correction loses precision
    torch.testing.assert_close(logp[near].double(), expected[near], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(action.double(), torch.tanh(u), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(distribution.log_prob(params, action)[near], logp[near], rtol=1e-2, atol=2e-2)


def test_log_prob_holds_far_out() -> None:
    distribution = SquashedNormal(ActionSpace("continuous", (), 1))
    action, logp, *_ = distribution.rsample(torch.tensor([[30.0, 0.0], [-30.0, 0.0]]), torch.zeros(2, 1))
    # log(1 - tanh²(u)) → 2 log 2 - 2 |u|
    torch.testing.assert_close(logp, torch.full((2,), -0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 60.0))
    assert torch.isfinite(distribution.log_prob(torch.zeros(2, 2), action)).all()


def test_numpy_draws_are_the_same_distribution() -> None:
    distribution = SquashedNormal(CONTINUOUS)
    params = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    action, logp = distribution.sample(params, np.random.default_rng(1))
    noise = np.random.default_rng(1).standard_normal((5, 2), np.float32)
    same, same_logp, *_ = distribution.rsample(torch.from_numpy(params), torch.from_numpy(noise))
    np.testing.assert_allclose(action, same, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logp, same_logp, rtol=1e-4, atol=1e-5)
    assert action.dtype == logp.dtype == np.float32
    np.testing.assert_allclose(distribution.mode(params), np.tanh(params[:, :2]), rtol=1e-6)


@pytest.mark.parametrize("of_state", [True, False])
def test_rsample_has_the_derivative(of_state: bool) -> None:
    """Gradients of actions and log-probabilities equal autograd of torch's Normal. A log σ beyond its bounds has no gradient."""
    rng = torch.Generator().manual_seed(3)
    noise, grad_action, grad_logp = torch.randn(5, 2, generator=rng), torch.randn(5, 2, generator=rng), 0.7
    params = torch.randn(5, 4 if of_state else 2, generator=rng).requires_grad_()
    free = None if of_state else torch.tensor([-0.3, 2.5], requires_grad=True)
    with torch.no_grad():
        params[0, -1] += 9.0
    distribution = SquashedNormal(CONTINUOUS, None if free is None else free.detach())
    sample = distribution.rsample(params.detach(), noise)
    found, grad_free = sample.parameter_gradient(grad_action, grad_logp)
    loc, log_std = params.chunk(2, dim=1) if free is None else (params, free)
    normal = torch.distributions.Normal(loc, log_std.clamp(-5.0, 2.0).exp())
    u = normal.loc + normal.scale * noise
    correction = 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
    loss = (grad_action * u.tanh()).sum() + grad_logp * (normal.log_prob(u) - correction).sum()
    expected = torch.autograd.grad(loss, [params] if free is None else [params, free])
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    arrays = distribution.rsample(params.detach().numpy(), noise.numpy())
    grad_params, grad_log_std = arrays.parameter_gradient(grad_action.numpy(), grad_logp)
    np.testing.assert_allclose(arrays.logp_B, sample.logp_B, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_params, found, rtol=1e-5, atol=1e-5)
    assert grad_params.dtype == arrays.logp_B.dtype == np.float32
    if grad_free is not None:
        torch.testing.assert_close(grad_free, expected[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grad_log_std, grad_free, rtol=1e-5, atol=1e-5)


# critics


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("name", ["ReLU", "tanh", "elu"])
def test_stack_equals_separate_critics(action: ActionSpace, name: str) -> None:
    spec = MLPNetSpec(name="MLPNet", hid_layers=[8, 6], hid_layers_activation=name, init_fn="orthogonal_")
    critics = [QCritic(spec, OBS, action) for _ in range(2)]
    stacked, separate = StackedCritics(critics), SeparateCritics(critics)
    obs, given = torch.randn(5, 4), [torch.rand(5, 2, requires_grad=True)] if action is CONTINUOUS else []
    q, same = stacked(obs, *given), separate(obs, *given)
    torch.testing.assert_close(q, same)
    assert q.shape == ((2, 5) if action is CONTINUOUS else (2, 5, 3))
    assert not torch.equal(q[0], q[1]), "each has weights of its own"
    weight_grads = torch.autograd.grad(same.square().sum(), [*separate.parameters(), *given])
    grads = torch.autograd.grad(q.square().sum(), [*stacked.parameters(), *given])
    one, two = weight_grads[:6], weight_grads[6:12]  # in the order of the layers: weight, bias
    for stack, *apart in zip(grads, one, two, strict=False):
        torch.testing.assert_close(stack.flatten(), torch.stack(apart).flatten())
    if given:
        torch.testing.assert_close(grads[-1], weight_grads[-1])
        for parameter in stacked.parameters():
            parameter.requires_grad_(False)
        frozen = torch.autograd.grad(stacked(obs, *given).square().sum(), given)
        torch.testing.assert_close(frozen[0], grads[-1])


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, StackedCritics),
        ({"layer_norm": True}, SeparateCritics),
        ({"batch_norm": True}, SeparateCritics),
        ({"hid_layers_activation": "PReLU"}, SeparateCritics),
        ({"optim_spec": {"name": "Muon"}}, SeparateCritics),
        ({"optim_spec": {"name": "Adafactor"}}, SeparateCritics),
    ],
)
def test_only_plain_layers_are_stacked(changes: dict[str, Any], kind: type) -> None:
    spec = MLPNetSpec.model_validate({"name": "MLPNet", **changes})
    assert type(build_critics(spec, OBS, CONTINUOUS)) is kind


def test_image_features_meet_the_action_late() -> None:
    spec = ConvNetSpec.model_validate(CONV)
    critics = build_critics(spec, ObservationSpace((3, 9, 9), "uint8"), CONTINUOUS)
    obs = torch.randint(0, 256, (5, 3, 9, 9), dtype=torch.uint8)
    q = critics(obs, torch.zeros(5, 2))
    assert q.shape == (2, 5)
    assert not torch.equal(q, critics(obs, torch.ones(5, 2)))


def norm_of(layer: torch.nn.Module) -> float:
    """Return the largest singular value of a layer's weight, as it is used."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return float(torch.linalg.matrix_norm(weight.detach().flatten(1), 2))


@pytest.mark.parametrize("flat", [False, True])
def test_spectral_norm_bounds_the_last_hidden_layer(flat: bool) -> None:
    critics = build_critics(MLPNetSpec(name="MLPNet", hid_layers=[16, 16], init_fn="orthogonal_"), OBS, CONTINUOUS, spectral=True)
    vectors = FlatParams(critics) if flat else None
    for parameter in critics.parameters():
        parameter.data.mul_(5.0)
    assert isinstance(critics, SeparateCritics)
    for _ in range(50):  # power iterations
        critics(torch.randn(5, 4), torch.randn(5, 2))
    for critic in critics.critics:
        first, last = critic.body.layers[0], critic.body.layers[2]  # type: ignore[union-attr,index]
        assert norm_of(last) == pytest.approx(1.0, abs=1e-3)
        assert norm_of(first) > 2.0, "that before it is free"
        assert norm_of(critic.head) > 2.0, "the output layer is free"  # type: ignore[arg-type]
    critics.eval()
    before = [buffer.clone() for buffer in critics.buffers()]
    critics(torch.randn(5, 4), torch.randn(5, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, critics.buffers(), strict=True))
    if vectors is not None:
        assert torch.equal(torch.cat([buffer.flatten() for buffer in critics.buffers()]), vectors.buffer), "still views"


ARC_NET = {"name": "TorchArcNet", "arc": {"modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 8}}, {"Tanh": None}]}}}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kwargs", "width"),  # outputs of the layer whose norm is bounded
    [
        ({"net": {**MLP, "hid_layers": [7, 5]}}, 5),
        ({"net": {**MLP, "hid_layers": [7, 5]}, "action": DISCRETE}, 5),
        ({"net": ARC_NET}, 8),
        ({"net": {**CONV, "fc_hid_layers": [9, 6]}, "shape": (3, 9, 9), "dtype": "uint8", "action": DISCRETE}, 6),
        ({"net": {**CONV, "fc_hid_layers": [6]}, "shape": (3, 9, 9), "dtype": "uint8"}, 6),  # one more layer, for the action
        ({"name": "CrossQ", "critic_net": {**MLP, "hid_layers": [7, 5], "batch_norm": True}}, 5),
    ],
)
def test_spectral_norm_is_on_one_layer_of_each_critic_and_target(kwargs: dict[str, Any], width: int) -> None:
    agent, env = build(spectral_norm=True, **kwargs)
    drive(agent, env, 40)
    algorithm = algorithm_of(agent)
    for critics in (algorithm.critics, *([] if algorithm.target is None else [algorithm.target.net])):
        assert isinstance(critics, SeparateCritics)
        for critic in critics.critics:
            linear = [layer for layer in critic.modules() if isinstance(layer, torch.nn.Linear)]
            bounded = [torch.nn.utils.parametrize.is_parametrized(layer) for layer in linear]
            assert bounded == [False] * (len(linear) - 2) + [True, False]
            assert linear[-2].out_features == width
            assert norm_of(linear[-2]) == pytest.approx(1.0, abs=0.02)
            assert not any(torch.nn.utils.parametrize.is_parametrized(layer) for layer in critic.modules() if layer not in linear)


@pytest.mark.slow
def test_a_target_net_that_moves_slowly_is_normalised_too() -> None:
    net = {**MLP, "hid_layers": [16, 16], "update_type": "polyak", "polyak_coef": 0.02}
    agent, env = build(spectral_norm=True, net=net)
    drive(agent, env, 150)
    for critic in target_of(algorithm_of(agent)).net.critics:
        assert norm_of(critic.body.layers[2]) == pytest.approx(1.0, abs=0.05)


# the equations


def with_alpha(algorithm: SoftActorCritic, alpha: float) -> SoftActorCritic:
    """Return the algorithm with a fixed temperature."""
    algorithm.temperature.value = lambda frame: alpha  # type: ignore[method-assign]
    return algorithm


def prepared(name: str, alpha: float, **keys: Any) -> Any:
    """Return an algorithm for continuous actions with a target net that differs from the critics, and a given temperature."""
    algorithm = build(CONTINUOUS, name=name, **keys)[0].algorithm
    torch.manual_seed(3)
    move_target(algorithm)
    with_alpha(algorithm, alpha)
    return algorithm


def target_of(algorithm: SoftActorCritic) -> TargetNet[Any]:
    assert algorithm.target is not None
    return algorithm.target


def q_of(algorithm: SoftActorCritic, obs: Tensor, action: Tensor | None, target: bool = False) -> Tensor:
    with torch.no_grad():
        return (target_of(algorithm).net if target else algorithm.critics)(obs, action).clone()


def move_target(algorithm: SoftActorCritic) -> None:
    """Make the target nets differ from the critics."""
    target_of(algorithm).flat.param.add_(0.1 * torch.randn_like(target_of(algorithm).flat.param))


ONE_OF_TWO = {"min": lambda q_CX: torch.min(q_CX[0], q_CX[1]), "mean": lambda q_CX: (q_CX[0] + q_CX[1]) / 2}


@pytest.mark.parametrize("weights", [[1.0, 0.5, 0.0, 0.25], None])
def test_priorities_are_the_errors_of_the_lower_critic(weights: list[float] | None) -> None:
    memory = {"name": "PrioritizedReplay", "batch_size": 4, "max_size": 500}
    agent, env = build(DISCRETE, gamma=0.0, memory=memory)
    drive(agent, env, 10)
    algorithm = algorithm_of(agent)
    batch = transitions(torch.tensor([0, 2, 1, 1]), weight_B=None if weights is None else torch.tensor(weights))
    told: list[tuple[np.ndarray, Tensor]] = []
    algorithm.memory.update_priorities = lambda row_B, error_B: told.append((row_B, error_B))  # type: ignore[method-assign]
    q = q_of(algorithm, batch.obs_B, None)[:, torch.arange(4), batch.action_B]
    algorithm.meter.begin()
    with_alpha(algorithm, 0.3)._critic_step(batch)
    np.testing.assert_array_equal(told[0][0], batch.row_B)
    torch.testing.assert_close(told[0][1].abs(), (torch.minimum(q[0], q[1]) - batch.reward_B).abs())


@pytest.mark.parametrize("reduction", ["min", "mean"])
def test_actor_loss_of_continuous_actions_moves_only_the_actor(reduction: str) -> None:
    agent, _ = build(critic_reduction=reduction)
    algorithm = algorithm_of(agent)
    batch = transitions(torch.rand(6, 2) - 0.5)
    noise = np.random.default_rng(3).normal(size=(6, 2))
    algorithm.rng = Scripted(noise)  # type: ignore[assignment]
    critics, actor = algorithm.trainer.flat.param.clone(), algorithm.actor_trainer.flat.param.clone()
    with torch.no_grad():
        params = algorithm.net.actor(batch.obs_B)
        action, logp, *_ = SquashedNormal(CONTINUOUS).rsample(params, torch.from_numpy(noise.astype(np.float32)))
    q = q_of(algorithm, batch.obs_B, action)
    loss, entropy, norm = with_alpha(algorithm, 0.3)._actor_step(batch, q)
    assert loss == pytest.approx(float((0.3 * logp - ONE_OF_TWO[reduction](q)).mean()), rel=1e-4)
    assert entropy == pytest.approx(float(-logp.mean()), rel=1e-4)
    assert norm > 0.0
    assert torch.equal(critics, algorithm.trainer.flat.param)
    assert not algorithm.trainer.flat.grad.any(), "the critics' next step takes no gradient of the actor's loss"
    assert all(parameter.requires_grad for parameter in algorithm.critics.parameters())
    assert not torch.equal(actor, algorithm.actor_trainer.flat.param)


def test_the_moving_average_of_the_entropy_is_saved_once_it_is_known() -> None:
    one, _ = build(DISCRETE, entropy_penalty_coef=0.7)
    assert one.state_dict()["algorithm"]["mean_entropy"] is None
    algorithm_of(one)._actor_step(transitions(torch.tensor([0, 2, 1, 1])), torch.randn(2, 4, 3))
    other, _ = build(DISCRETE, entropy_penalty_coef=0.7)
    other.load_state_dict(one.state_dict())
    assert algorithm_of(other).mean_entropy == algorithm_of(one).mean_entropy is not None


@pytest.mark.slow
def test_bandit_policy_is_the_softmax_of_rewards_over_alpha() -> None:
    reward = np.array([1.0, 0.5, 0.0], np.float32)
    net = {**MLP, "optim_spec": {"name": "Adam", "lr": 0.02}}
    toy = sac_spec(net, {"name": "Replay", "batch_size": 32, "max_size": 500}, num_envs=8, gamma=0.9, fixed_alpha=0.5, training_iter=2)
    agent = agent_of(toy, EnvInfo(8, OBS, DISCRETE, max_frame=8000))
    env = ToyEnv(info(8))
    obs, acting = np.ones((8, 4), np.float32), Acting(agent, 8)
    for _ in range(400):
        out = acting.act(obs)
        step = env.step(out.action_N)
        every = np.ones(8, np.bool_)
        step = step._replace(
            reward_N=reward[out.action_N], last_obs_N=obs, obs_N=obs, terminated_N=every, truncated_N=~every, first_N=every
        )
        agent.clock.tick(8)
        acting.observe(obs, out, step)
        if agent.ready():
            agent.update()
    with torch.no_grad():
        p = F.softmax(algorithm_of(agent).net.actor(torch.ones(1, 4)), dim=1)[0]
    np.testing.assert_allclose(p, F.softmax(torch.from_numpy(reward) / 0.5, dim=0), atol=0.03)


def temperature_of(action: ActionSpace = CONTINUOUS, max_frame: int = 1000, **keys: Any) -> tuple[Temperature, OptimizerGroup]:
    """Return a temperature and the optimizer group of the actor, which sets its learning rate."""
    spec = sac_spec(**keys)
    assert isinstance(spec.agent.algorithm, SoftActorCriticSpec)
    assert spec.agent.net is not None
    actor = OptimizerGroup(FlatParams(torch.nn.Linear(1, 1)), 0, spec.agent.net, "")
    return Temperature(spec.agent.algorithm, EnvInfo(1, OBS, action, max_frame=max_frame), actor), actor


@pytest.mark.parametrize("alpha_lr", [None, 0.07])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "SGD"])
def test_temperature_has_the_actors_optimizer_and_schedule(name: str, alpha_lr: float | None) -> None:
    """Steps equal those of torch's optimizer and scheduler on log α with the loss J(α) = −α (H̄ − H), eq. 18."""
    kwargs = {"betas": (0.5, 0.99)} if name.startswith("Adam") else {}
    net = {**MLP, "optim_spec": {"name": name, "lr": 0.02, **kwargs}, "lr_scheduler_spec": {"name": "StepLR", "step_size": 3, "gamma": 0.5}}
    temperature, actor = temperature_of(net=net, target_entropy=-1.0, **({} if alpha_lr is None else {"alpha_lr": alpha_lr}))
    log_alpha = torch.nn.Parameter(torch.zeros(1))
    optimizer = vars(torch.optim)[name]([log_alpha], lr=alpha_lr or 0.02, **kwargs)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for call in range(9):
        entropy = 1.5 - 0.4 * call
        actor.set_lr(10 * call, call, 1.0)
        temperature.step(entropy, 10 * call)
        optimizer.zero_grad()
        (-log_alpha.exp() * (-1.0 - entropy)).backward()
        optimizer.step()
        scheduler.step()
        assert temperature.log_alpha.item() == pytest.approx(log_alpha.item(), rel=1e-4, abs=1e-6)
        log_alpha.grad = None
    assert abs(log_alpha.item()) > 0.01


class Recording:
    """Store of one process that runs the functions it is given and records the names of their sections."""

    workers, index, remote, fresh = 2, 0, False, True

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run_locked(self, section: str, function: Any, *args: Any) -> Any:
        self.ran.append(section)
        return function(*args)


@pytest.mark.parametrize(
    "optim", [{"name": "Adam", "lr": 0.02}, {"name": "SGD", "lr": 0.02, "momentum": 0.9}], ids=lambda optim: optim["name"]
)
def test_a_shared_temperature(optim: dict[str, Any]) -> None:
    """The store steps the temperature, and each process saves the parts of its optimizer that are not shared."""
    (temperature, _), (resumed, _) = (temperature_of(net={**MLP, "optim_spec": optim}, target_entropy=-1.0) for _ in range(2))
    arrays = {name: shared.values for name, shared in temperature.shared_arrays().items()}
    store = Recording()
    temperature.attach(store, arrays)  # type: ignore[arg-type]
    temperature.step(0.5, 0)
    assert store.ran == ["update"]
    assert temperature.log_alpha.item() == arrays["log_alpha"][0] < 0.0
    resumed.attach(Recording(), {name: array.copy() for name, array in arrays.items()})  # type: ignore[arg-type]
    resumed.load_state_dict(copy.deepcopy(temperature.state_dict()))
    for one in (temperature, resumed):
        one.step(0.5, 0)
    assert resumed.log_alpha.item() == temperature.log_alpha.item()


def test_fixed_temperature_and_its_anneal() -> None:
    temperature, _ = temperature_of(fixed_alpha=0.4, alpha_anneal_frames=100)
    temperature.step(5.0, 0)
    assert [temperature.value(frame) for frame in (0, 50, 100, 200)] == pytest.approx([0.4, 0.2, 0.0, 0.0])
    for keys in ({}, {"alpha_anneal_frames": 0}):
        assert temperature_of(fixed_alpha=0.4, **keys)[0].value(10**9) == 0.4


@pytest.mark.parametrize(
    ("keys", "action", "expected"),
    [
        ({}, CONTINUOUS, (-2.0, -2.0)),
        ({}, DISCRETE, (0.6 * math.log(3), 0.6 * math.log(3))),
        ({"target_entropy_ratio": 0.9}, DISCRETE, (0.9 * math.log(3), 0.9 * math.log(3))),
        ({"entropy_anneal": {"start_ratio": 0.8, "end_ratio": 0.3, "frames": 200}}, DISCRETE, (0.8 * math.log(3), 0.3 * math.log(3))),
        ({"entropy_anneal": {"end_ratio": 0.1, "frames": 200}}, DISCRETE, (0.6 * math.log(3), 0.1 * math.log(3))),
        ({"entropy_anneal": {"start_ratio": 0.8, "frames": 200}}, DISCRETE, (0.8 * math.log(3), 0.8 * math.log(3))),
        ({"entropy_anneal": {"start_ratio": 0.8, "end_ratio": 0.3}}, DISCRETE, (0.8 * math.log(3), 0.8 * math.log(3))),
        ({"entropy_anneal": True}, CONTINUOUS, (-2.0, -4.0)),
        ({"entropy_anneal": True}, DISCRETE, (0.6 * math.log(3), 0.0)),
        ({"target_entropy": 0.5, "entropy_anneal": 0.1}, DISCRETE, (0.5, 0.1)),
        ({"target_entropy": 0.5, "entropy_anneal": 0.0}, DISCRETE, (0.5, 0.0)),
        ({"target_entropy": -3.0}, CONTINUOUS, (-3.0, -3.0)),
    ],
)
def test_target_entropies(keys: dict[str, Any], action: ActionSpace, expected: tuple[float, float]) -> None:
    spec = sac_spec(**keys).agent.algorithm
    assert target_entropies(spec, action) == pytest.approx(expected)  # type: ignore[arg-type]
    temperature, _ = temperature_of(action, 200, **keys)
    middle = 0.5 * (expected[0] + expected[1])
    assert [temperature.target_entropy(frame) for frame in (0, 100, 200, 300)] == pytest.approx(
        [expected[0], middle, expected[1], expected[1]]
    )


def test_the_target_entropy_is_annealed_over_its_own_frames() -> None:
    temperature, _ = temperature_of(DISCRETE, entropy_anneal={"start_ratio": 1.0, "end_ratio": 0.5, "frames": 80})
    ratios = [temperature.target_entropy(frame) / math.log(3) for frame in (0, 20, 80, 500)]
    assert ratios == pytest.approx([1.0, 0.875, 0.5, 0.5])


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize(("keys", "bounds"), [({}, (-5.0, 2.0)), ({"log_alpha_min": -0.15, "log_alpha_max": 0.25}, (-0.15, 0.25))])
def test_log_alpha_stays_within_its_bounds(action: ActionSpace, keys: dict[str, float], bounds: tuple[float, float]) -> None:
    for entropy, bound in zip((9.0, -9.0), bounds, strict=True):
        temperature, _ = temperature_of(action, alpha_lr=1.0, **keys)
        for _ in range(30):
            temperature.step(entropy, 0)
        assert temperature.log_alpha.item() == pytest.approx(bound)


def test_the_first_temperature() -> None:
    for keys, first in (({}, 1.0), ({"initial_alpha": 0.3}, 0.3), ({"log_alpha_max": -1.0}, math.exp(-1.0))):
        temperature, _ = temperature_of(alpha_lr=1.0, **keys)
        assert temperature.value(0) == pytest.approx(first)
        temperature.step(9.0, 0)
        assert temperature.value(0) != pytest.approx(first)
        temperature.reset()
        assert temperature.value(0) == pytest.approx(first)


@pytest.mark.parametrize("net", [MLP, {**MLP, "layer_norm": True}], ids=["stacked", "separate"])
def test_gradients_of_critics_are_clipped_by_the_norm_of_each(net: dict[str, Any]) -> None:
    """One SGD step with a learning rate of 1 moves each critic by its gradient, clipped by its own norm."""
    net, moved = {**net, "optim_spec": {"name": "SGD", "lr": 1.0}}, []
    batch = transitions(torch.rand(6, 2) - 0.5)
    for clip in (None, 0.01):
        torch.manual_seed(0)
        algorithm = algorithm_of(build(critic_net={**net, "clip_grad_val": clip})[0])
        params = list(algorithm.critics.parameters())
        stacked = isinstance(algorithm.critics, StackedCritics)
        assert stacked is ("layer_norm" not in net)
        before = [parameter.detach().clone() for parameter in params]
        algorithm.rng = np.random.default_rng(5)
        algorithm.meter.begin()
        with_alpha(algorithm, 0.3)._critic_step(batch)
        change = [old - new.detach() for old, new in zip(before, params, strict=True)]
        half = len(change) // 2
        each = [[x[c] for x in change] for c in range(2)] if stacked else [change[:half], change[half:]]
        moved.append([torch.cat([x.flatten() for x in critic]) for critic in each])
    for free, clipped in zip(*moved, strict=True):
        assert free.norm() > 0.01
        torch.testing.assert_close(clipped, free * 0.01 / free.norm(), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("action", "reduction"), [(CONTINUOUS, "min"), (DISCRETE, "mean")], ids=["continuous", "discrete"])
def test_critics_are_reduced_by_the_kind_of_actions(action: ActionSpace, reduction: str) -> None:
    algorithm = algorithm_of(build(action)[0])
    q = torch.randn(2, 5)
    torch.testing.assert_close(algorithm.reduce(q), ONE_OF_TWO[reduction](q))


# the whole update


def test_policy_delay_counts_the_critics_steps() -> None:
    agent, env = build(policy_delay=3, training_iter=1)
    drive(agent, env, 3)
    algorithm = algorithm_of(agent)
    moved = []
    for _ in range(9):
        before, log_alpha = algorithm.actor_trainer.flat.param.clone(), algorithm.temperature.log_alpha.clone()
        critics = algorithm.trainer.flat.param.clone()
        agent.update()
        assert not torch.equal(critics, algorithm.trainer.flat.param)
        moved.append(not torch.equal(before, algorithm.actor_trainer.flat.param))
        assert moved[-1] == (not torch.equal(log_alpha, algorithm.temperature.log_alpha))
    assert moved == [steps % 3 == 0 for steps in range(algorithm.critic_steps - 8, algorithm.critic_steps + 1)]


@pytest.mark.parametrize(("training_iter", "steps"), [(None, 3), (5, 5)])
def test_an_update_is_training_iter_batches(training_iter: int | None, steps: int) -> None:
    agent, env = build(training_iter=training_iter)
    updates = len(drive(agent, env, 6))
    assert updates == 6  # 3 transitions and at most one update per step; training_start_step is 0
    assert agent.clock.opt_step == steps * updates == algorithm_of(agent).critic_steps


def test_a_frozen_log_std_stays() -> None:
    agent, env = build(net={**MLP, "log_std_init": -0.5})
    log_std = algorithm_of(agent).distribution.log_std
    before = log_std.requires_grad_(False).clone()
    assert drive(agent, env, 12)
    assert torch.equal(log_std, before)


OWN_OPTIMIZERS = {
    "use_same_optim": False,
    "actor_optim_spec": {"name": "RMSprop", "lr": 0.01},
    "critic_optim_spec": {"name": "SGD", "lr": 0.1},
}
KINDS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "discrete": {"action": DISCRETE, "action_pdtype": "GumbelSoftmax", "entropy_penalty_coef": 0.1},
    "prioritised": {"memory": {"name": "PrioritizedReplay", "batch_size": 8, "max_size": 500}},
    "symlog": {"symlog": True, "policy_delay": 2},
    "spectral": {"spectral_norm": True},
    "batch norm": {"net": {**MLP, "batch_norm": True}},
    "layer norm": {"net": {**MLP, "layer_norm": True}, "action": DISCRETE},
    "own optimizers": {"net": {**MLP, **OWN_OPTIMIZERS}},
    "free log_std": {"net": {**MLP, "log_std_init": -0.5}},
    "images": {"net": CONV, "shape": (3, 9, 9), "dtype": "uint8"},
    "discrete images": {"net": CONV, "shape": (3, 9, 9), "dtype": "uint8", "action": DISCRETE},
    "crossq": {"name": "CrossQ", "policy_delay": 3},
    "discrete crossq": {"name": "CrossQ", "action": DISCRETE},
    "crossq with a plain net": {"name": "CrossQ", "critic_net": {**MLP, "batch_norm": True}},
    "crossq with one arc": {"name": "CrossQ", "net": {**BRN, "arc": BRN["critic_arc"]}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_continues_identically(kind: str) -> None:
    one, env = build(**KINDS[kind])
    metrics = drive(one, env, 12)
    assert all(math.isfinite(m.loss) and m.grad_norm > 0 for m in metrics)
    assert metrics[-1].extra["alpha"] > 0
    other, _ = build(**KINDS[kind])
    other.load_state_dict(one.state_dict())
    other.clock.load_state_dict(one.clock.state_dict())
    memory, copied = algorithm_of(one).memory, algorithm_of(other).memory
    copied.load_contents(memory.contents())
    after, after_other = (drive(agent, ToyEnv(env.info, seed=5), 8) for agent in (one, other))
    assert [(m.loss, m.grad_norm, m.entropy, m.extra) for m in after] == [(m.loss, m.grad_norm, m.entropy, m.extra) for m in after_other]
    assert torch.equal(algorithm_of(one).actor_trainer.flat.param, algorithm_of(other).actor_trainer.flat.param)
    assert torch.equal(algorithm_of(one).trainer.flat.param, algorithm_of(other).trainer.flat.param)


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_crossq_statistics_are_of_both_states(action: ActionSpace) -> None:
    agent, _ = build(action, name="CrossQ")
    algorithm = algorithm_of(agent)
    norms = [m for m in algorithm.critics.modules() if type(m).__name__ == "BatchRenorm1d"]
    batch = transitions(torch.zeros(6, 2) if action is CONTINUOUS else torch.zeros(6, dtype=torch.int64))
    algorithm.meter.begin()
    with_alpha(algorithm, 0.3)._critic_step(batch)
    both = torch.cat([batch.obs_B, batch.next_obs_B])
    for norm in norms:
        torch.testing.assert_close(norm.running_mean[:4], 0.01 * both.mean(0))
    before = algorithm.trainer.flat.buffer.clone()
    algorithm.meter.begin()  # layers in training mode
    with_alpha(algorithm, 0.3)._actor_step(batch, torch.randn(2, 6, 3))
    assert torch.equal(before, algorithm.trainer.flat.buffer), "the actor's loss leaves the statistics alone"


def test_crossq_has_no_target_net_and_values_both_states_alike() -> None:
    agent, _ = build(name="CrossQ")
    algorithm = algorithm_of(agent)
    assert algorithm.target is None
    batch = transitions(torch.rand(6, 2) - 0.5)
    batch = batch._replace(next_obs_B=batch.obs_B)
    _, q, next_q = algorithm._current_and_next_values(batch, batch.action_B)
    torch.testing.assert_close(q, next_q)


# invalid specs


@pytest.mark.parametrize(
    ("action", "kwargs", "words"),
    [
        (DISCRETE, {"target_entropy": -1.0}, ["agent.algorithm.target_entropy", "-1", "ln 3 = 1.1", "auto"]),
        (DISCRETE, {"target_entropy": 1.2}, ["agent.algorithm.target_entropy", "1.2", "between 0 and"]),
        (DISCRETE, {"entropy_anneal": -0.5}, ["agent.algorithm.entropy_anneal", "-0.5", "true"]),
        (CONTINUOUS, {"spectral_norm": True, "net": {**MLP, "hid_layers": []}}, ["agent.algorithm.spectral_norm", "hidden layer"]),
        (DISCRETE, {"action_pdtype": "Normal"}, ["agent.algorithm.action_pdtype", "Normal", "Categorical, GumbelSoftmax"]),
        (CONTINUOUS, {"action_pdtype": "Categorical"}, ["agent.algorithm.action_pdtype", "Categorical", "default, Normal"]),
    ],
)
def test_what_does_not_fit_is_refused(action: ActionSpace, kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        build(action, **kwargs)
    for word in words:
        assert word in str(caught.value)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(SpecError) as caught:
        build(DISCRETE, target_entropy=-1.0, action_pdtype="Normal")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("action", "keys", "path"),
    [
        (CONTINUOUS, {"entropy_penalty_coef": 0.5}, "agent.algorithm.entropy_penalty_coef"),
        (CONTINUOUS, {"entropy_anneal": {"end_ratio": 0.5, "frames": 9}}, "agent.algorithm.entropy_anneal"),
        (DISCRETE, {"net": {**MLP, "log_std_init": -1.0}}, "agent.net.log_std_init"),
    ],
)
def test_what_has_no_effect_is_a_notice(action: ActionSpace, keys: dict[str, Any], path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A key without effect causes a notice, and the update equals that of a spec without the key."""
    after = []
    for given in (keys, {}):
        torch.manual_seed(0)
        agent, env = build(action, **given)
        drive(agent, env, 6)
        after.append(algorithm_of(agent).actor_trainer.flat.param.clone())
    assert torch.equal(*after)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [path]


def test_critic_net_is_the_critics_own() -> None:
    agent, _ = build(critic_net={**MLP, "hid_layers": [5]})
    critics = algorithm_of(agent).critics
    assert isinstance(critics, StackedCritics)
    assert critics.layer_parameters[0][0].shape == (2, 5, 6)


@pytest.mark.parametrize(
    ("critic_net", "path"),
    [
        (CONV, "agent.critic_net.name: ConvNet needs"),
        ({**MLP, "optim_spec": {"name": "Adam", "betas": [0.9]}}, "agent.critic_net.optim_spec: "),
        ({**MLP, "loss_spec": {"name": "SmoothL1Loss", "beta": -1.0}}, "agent.critic_net.loss_spec: "),
    ],
)
def test_what_is_wrong_with_the_critics_net_is_told_there(critic_net: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as error:
        build(critic_net=critic_net)
    assert str(error.value.problems[0]).startswith(path)


def test_the_temperature_is_the_entropy_coef_of_the_rows() -> None:
    agent, _ = build(fixed_alpha=0.4, alpha_anneal_frames=100)
    agent.clock.frame = 25
    assert agent.entropy_coef == pytest.approx(0.3)
