"""Tests of agents trained in multi-agent envs: enjoy, matches between runs, human play in the terminal, choice of policies by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from gymnasium import spaces

from slm_lab import load_agent, load_spec
from slm_lab.env.agent_spaces import agent_spaces
from slm_lab.env.board_players import OnePlyConnectFour
from slm_lab.env.boards import BOARD_GAMES
from slm_lab.env.vec import Env
from slm_lab.experiment.deploy.enjoy import EnjoyOptions, EnjoyResult, _check_agents, enjoy, format_summary
from slm_lab.experiment.deploy.human import play_human
from slm_lab.experiment.deploy.players import Opponent, PolicyPlayer
from slm_lab.experiment.deploy.register import export
from slm_lab.experiment.files.find import TrainingChoice, find_training
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.training.self_play import team_score
from slm_lab.lib.records import ActionSpace, EnvInfo, ObservationSpace
from slm_lab.spec.models.env import EnvSpec
from tests.experiment.small_runs import ROLLOUT
from tests.experiment.test_agents import BATCH, PLAIN, duel, two_policies
from tests.resume.runs import train

PLAN = Plan()
TICTACTOE = {
    "agent": {"algorithm": {"name": "PPO", **ROLLOUT}, "memory": BATCH, "net": PLAIN},
    "env": {"name": "TicTacToe-v1", "num_envs": 4, "max_frame": 200},
    "meta": {"self_play": {"rating_games": 0}},
}


def trained(folder: Path, body: dict[str, Any]) -> RunPaths:
    return train(load_spec({"run": body}, "run"), folder / "run")[1]


@pytest.fixture(scope="module")
def tictactoe(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return trained(tmp_path_factory.mktemp("games"), TICTACTOE)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    body = two_policies(good=["left"], evil=["right"])
    body["env"]["max_frame"] = 400
    return trained(tmp_path_factory.mktemp("policies"), body)


@pytest.fixture(scope="module")
def duels(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return trained(tmp_path_factory.mktemp("duels"), duel(frames=400))


def played(paths: RunPaths, policy: str | None = None, **options: Any) -> EnjoyResult:
    return enjoy(
        find_training(paths.root, None, paths.root.parent, TrainingChoice(policy=policy)),
        EnjoyOptions(**{"which": "last", "episodes": 4, **options}),
        PLAN,
    )


def test_the_score_of_a_team() -> None:
    """Two own agents have the returns 1 and 0, and the opponent has 0: a win and a draw give the score (1 + 0.5) / 2."""
    assert team_score(np.array([1.0, 0.0, 0.0]), np.array([True, True, False])) == 0.75
    assert team_score(np.array([-1.0, 1.0]), np.array([True, False])) == 0.0


def test_each_agent_is_played_by_its_policy(policies: RunPaths) -> None:
    """In a two-player game with one winner, the returns of a game are opposite; the summary names agents and policies."""
    result = played(policies)
    assert result.games is not None
    assert [returns.sum() for returns in result.games.returns] == [0.0] * 4
    assert result.games.policy_of == {"left": "good", "right": "evil"}
    lines = format_summary(result).splitlines()
    assert [line.split(":")[0].strip() for line in lines[2:]] == ["4 episodes", "left (policy good)", "right (policy evil)"]


def test_one_policy_plays_for_all_agents(duels: RunPaths) -> None:
    result = played(duels, episodes=5)
    assert result.games is not None
    assert len(result.games.returns) == 5
    assert list(result.games.policy_of.values()) == ["", ""]


@pytest.mark.parametrize("against", ["random", "duels"])
def test_games_against_another_player(duels: RunPaths, against: str) -> None:
    result = played(duels, against=str(duels.root) if against == "duels" else against, episodes=6)
    assert result.games is not None
    assert len(result.games.scores) == 6
    assert set(result.games.scores) <= {0.0, 1.0}
    won = result.games.scores.count(1.0)
    assert f"6 episodes against {result.games.opponent}: won {won}, drawn 0, lost {6 - won}" in format_summary(result)


def test_a_perfect_player_never_loses(tictactoe: RunPaths) -> None:
    games = played(tictactoe, against="PerfectTicTacToe", episodes=40).games
    assert games is not None
    assert max(games.scores) <= 0.5


@pytest.mark.parametrize(
    ("run", "policy", "options", "message"),
    [
        ("policies", "good", {}, "policy good acts for left only; who plays for right?"),
        ("policies", "goood", {}, "did you mean 'good'?"),
        ("duels", None, {"against": "randm"}, "did you mean 'random'?"),
        ("duels", None, {"against": "OnePlyConnectFour"}, "cannot play"),
        ("duels", None, {"record": Path("never.npz")}, "--record is not supported"),
    ],
)
def test_what_cannot_be_played(request: pytest.FixtureRequest, run: str, policy: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        played(request.getfixturevalue(run), policy, **options)


def test_an_opponent_of_the_only_agent_is_refused() -> None:
    """No other policy could be chosen with --policy."""
    info = EnvInfo(1, ObservationSpace((2,)), ActionSpace("discrete", (2,)), agents=("alone",))
    env, player, opponent = SimpleNamespace(info=info, name="Alone"), SimpleNamespace(agents=None, policy=None), Opponent("random")
    with pytest.raises(UserError, match=r"the policy plays for all agents of Alone.*remove --against"):
        _check_agents(cast(Env, env), [cast(PolicyPlayer, player)], opponent, EnjoyOptions())


def test_a_policy_is_loaded_by_its_name(policies: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="has several policies; choose one of good, evil"):
        load_agent(policies.root)
    agents = {name: load_agent(policies.root, "last", 0, policy=name) for name in ("good", "evil")}
    assert all(f"policy {name}" in agent.description for name, agent in agents.items())
    good, evil = (agent.policy.weights() for agent in agents.values())
    assert any(not np.array_equal(good[key], evil[key]) for key in good)
    with pytest.raises(UserError, match=r"no checkpoint of session 1 in .*; sessions: 0"):
        load_agent(policies.root, "last", 1, policy="good")


def test_a_model_of_one_policy_names_it(policies: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = export(policies.root, which="last", name="evil", policy="evil")
    assert "policy evil" in load_agent("evil").description
    assert done.card is not None
    assert "| `evil` of agent.policies, for `right` |" in done.card.read_text()
    model = find_training("evil", None, Path("data"))
    with pytest.raises(UserError, match="policy evil acts for right only"):
        enjoy(model, EnjoyOptions(), PLAN)
    games = enjoy(model, EnjoyOptions(against="random", episodes=2), PLAN).games
    assert games is not None
    assert len(games.scores) == 2


def connect_four(net: str) -> tuple[EnvInfo, np.ndarray]:
    """Return the info of ConnectFour for a net, and the encoded observation of a board in the form that the net reads.

    The player to move has stones in the lowest two cells of column 1, the opponent in the lowest cells of columns 2 to 4; column 1 is not a
    valid move.
    """
    spec = EnvSpec.model_validate({"name": "ConnectFour-v1", "max_frame": 1})
    planes = spaces.MultiBinary([6, 7, 2])
    space = spaces.Dict({"action_mask": spaces.MultiBinary(7), "obs": planes})
    known = agent_spaces(spec, space, spaces.Discrete(7), "image" if net == "ConvNet" else None)
    board = np.zeros((6, 7, 2), np.int8)
    board[[5, 4], 0, 0] = board[5, [1, 2, 3], 1] = 1
    obs_N = known.encode({"action_mask": np.array([[0, 1, 1, 1, 1, 1, 1]], np.int8), "obs": board[None]})
    return EnvInfo(2, known.observation, known.action, agents=("player_0", "player_1")), obs_N


@pytest.mark.parametrize("net", ["MLPNet", "ConvNet"])
def test_boards_in_plain_text(net: str) -> None:
    info, obs_N = connect_four(net)
    assert info.observation.has_images == (net == "ConvNet")
    game = BOARD_GAMES["ConnectFour-v1"]
    assert game.matches_env(info)
    assert not BOARD_GAMES["TicTacToe-v1"].matches_env(info)
    drawn = game.board_text(info.observation, obs_N[0], "X", "O").splitlines()
    assert [drawn[0], *drawn[-2:]] == ["   1 2 3 4 5 6 7", "   X . . . . . .", "   X O O O . . ."]
    assert game.valid_moves(info.observation, obs_N[0]) == list("234567")


@pytest.mark.parametrize("net", ["MLPNet", "ConvNet"])
def test_a_one_ply_player_prevents_four_in_a_row(net: str) -> None:
    info, obs_N = connect_four(net)
    player = OnePlyConnectFour(info, np.random.default_rng(0))
    assert player.act(np.repeat(obs_N, 5, axis=0)).tolist() == [4] * 5


def test_names_of_moves() -> None:
    assert BOARD_GAMES["Othello-v1"].moves[-2:] == ("h8", "pass")
    assert BOARD_GAMES["TicTacToe-v1"].moves[5] == "c2"


def lines(*given: str) -> Iterator[str]:
    yield from (f"{line}\n" for line in given)
    while True:
        yield ""


def human(paths: RunPaths, seat: str, *given: str, **options: Any) -> str:
    written: list[str] = []
    read = lines(*given)
    play_human(
        find_training(paths.root, None, paths.root.parent),
        EnjoyOptions(which="last", **options),
        PLAN,
        seat,
        lambda: next(read),
        written.append,
    )
    return "".join(written)


CELLS = [f"{column}{row}" for row in "123" for column in "abc"]


def test_a_person_plays_a_game(tictactoe: RunPaths) -> None:
    """The person tries each cell in order; occupied cells are refused, until somebody wins or the board is full."""
    text = human(tictactoe, "first", "z9", "", *CELLS)
    assert "'z9' is not a move" in text
    assert "You play X." in text
    assert text.index("your move (a1 b1 c1 a2 b2 c2 a3 b3 c3)") < text.index("O plays ")
    assert text.rstrip().splitlines()[-1] in ("you win", "the agent wins", "a draw")


def test_the_second_player_waits(tictactoe: RunPaths) -> None:
    text = human(tictactoe, "second", "q", episodes=3)
    assert text.index("X plays ") < text.index("your move (")
    assert "You play O." in text
    assert text.endswith("you have won 0, drawn 0, lost 0\n")


def test_only_board_games_are_played(duels: RunPaths) -> None:
    with pytest.raises(UserError, match=r"--human plays TicTacToe-v1, ConnectFour-v1, Othello-v1 only"):
        human(duels, "first")


@pytest.mark.slow
def test_a_game_is_read_from_a_pipe(tictactoe: RunPaths) -> None:
    command = [sys.executable, "-m", "slm_lab", f"enjoy@{tictactoe.root}", "--checkpoint", "last", "--human", "first"]
    done = subprocess.run(command, input="b2\nq\n", capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "O plays" in done.stdout
