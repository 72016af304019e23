"""Generate the last section of docs/BENCHMARKS.md, which lists the scores that are lower than a published score."""

from collections.abc import Sequence

import numpy as np

from bench.score_page import SECTIONS, Scored, Section, markdown, scored, sources
from slm_lab.experiment.report.compare_report import estimate_text
from slm_lab.experiment.report.progress import format_number
from slm_lab.experiment.report.study_report import bullets, compare_with_published

CLASSIC = Section("Classic control and Box2D", "benchmarks", "", "SLM Lab v5")
TITLE = "## Scores that are lower than a published score"
INTRO = """The table has each score of this page that is lower than a published score. The column "seeds" has the lowest and the highest
score of a seed, and the column "last tenth" has the change of the mean return in the last tenth of the frames."""
REMARKS_INTRO = "What is known about the causes, and what was tried with seeds 100 to 999:"

REMARKS = {
    ("benchmarks", "Acrobot-v1", "CrossQ"): (
        "Two of the 16 seeds have a return of -500 in every row, because they never reach the goal; random actions reach it in 3 % of the "
        "episodes. The other 14 scores are above the published score. Tried: an automatic temperature with the target entropy 0.2 (2 of "
        "5 seeds at -500 after 60,000 frames), and `fixed_alpha` annealed from 1 to 0 over 80,000 frames (4 of 4 seeds at -500 after "
        "100,000 frames)."
    ),
    ("benchmarks", "LunarLander-v3", "DQN"): (
        "From about 60,000 frames on, the agents hover, and their episodes last until the time limit of 1,000 steps. Most seeds begin "
        "to land between 100,000 and 150,000 frames, but five of the 16 seeds only after 200,000 frames. With version 0.2.0.dev0, the "
        "scores of eight of these seeds have a mean of 222 instead of 187 ([Rainbow](learning_curves.md#rainbow)). Tried: the settings "
        "of `ddqn_per_lunar` with uniform replay (scores 218, 235 and 230; as an exception, the first four seeds of the table were also "
        "tried: 249, 115, 55 and 249). Changes of these settings: rewards clipped to [-20, 100] (132 to 233), this and exploration "
        "until 100,000 frames (93 to 236), three-step returns (98 and 124, with and without the clipping; these agents land early, but "
        "do not improve afterwards)."
    ),
    ("benchmarks", "LunarLander-v3", "DDQN + PER"): "The difference is less than 0.1.",
    ("dm_control_5m", "CheetahRun-v1", "PPO"): "The published score is from 20 times as many frames.",
    ("dm_control_5m", "ReacherEasy-v1", "PPO"): "The published score is from 20 times as many frames.",
    ("dm_control_5m", "ReacherHard-v1", "PPO"): "The published score is from 20 times as many frames.",
    ("dm_control_5m", "FingerSpin-v1", "PPO"): "The published score is from 20 times as many frames.",
    ("dm_control_5m", "CartpoleBalanceSparse-v1", "PPO"): "Three of the four seeds have the highest possible return, 1,000.",
    ("dm_control_5m", "CartpoleSwingupSparse-v1", "PPO"): (
        "There is no reward until the pole is upright at the centre. Two of the four seeds never receive a reward, and one seed only late."
    ),
    ("dm_control_5m", "AcrobotSwingup-v1", "PPO"): (
        "The return hardly rises after 1 million frames. The published score is from 20 times as many frames. Tried: a gamma of 0.995 "
        "(a return of 36 after 5 million frames with one seed)."
    ),
    **{
        ("dm_control_5m", f"Humanoid{task}-v1", "PPO"): (
            "After 5 million frames, the return is hardly above that of random actions. The entropy of the policy rises in all runs. The "
            "published scores are from 20 (SLM Lab) and 6 (rl_games) times as many frames. Tried in HumanoidStand: no entropy bonus and a "
            "gamma of 0.995 (a return of 7 after 2 million frames with one seed)."
        )
        for task in ("Stand", "Walk")
    },
    **{
        ("dm_control_5m", f"FingerTurn{task}-v1", "PPO"): (
            "The reward is 1 while the tip of the spinner is at the target, and 0 otherwise. A probable cause is that agents rarely turn "
            "the spinner far enough: in 12 episodes of FingerTurnEasy with one agent (seed 100, 800,000 frames, no normalisation of "
            "observations), the returns were from 980 to 1,000 in three episodes, in which the target was near the first position of the "
            "spinner. In the other nine episodes, the return was 0, although the agent touched the spinner in about 20 % of the steps. The "
            "published scores are from 20 times as many frames. Tried in FingerTurnEasy with seed 100 (returns after 2 million frames): "
            "the shipped settings (250), no normalisation of observations (287), a `time_horizon` of 256 (217), a constant learning rate "
            "without `target_kl` (210), an `entropy_coef` of 0.02 (200), and a `gamma` of 0.995 (127)."
        )
        for task in ("Easy", "Hard")
    },
    ("dm_control_5m", "WalkerRun-v1", "PPO"): "The published score is from 20 times as many frames. The returns still rise at the end.",
    ("dm_control_5m", "WalkerWalk-v1", "PPO"): "The return of one of the four seeds stays near 570 from 1 million frames on.",
}
"""(study, env, algorithm) → what is known about the cause of a low score, and what was tried."""


def lower_scores() -> list[tuple[Scored, dict[str, float]]]:
    """Return (agent, source → published score) for each agent whose score is lower than at least one published score. Only these sources
    are returned."""
    found = []
    for section in (CLASSIC, *SECTIONS):
        agents = scored(section.study)
        columns = sources(section, agents)
        for agent in agents:
            published = {source: scores[agent.row.env, agent.row.entry] for source, scores in columns.items() if _key(agent)[1:] in scores}
            if lower := {source: score for source, score in published.items() if _comparison(agent, score) in ("≈", "below")}:
                found.append((agent, lower))
    return found


def lower_scores_text() -> str:
    """Return the section about the scores that are lower than a published score; "" if there are none."""
    found = lower_scores()
    if not found:
        return ""
    lines = [["env", "algorithm", "frames", "score", "published", "seeds", "last tenth"], *(_cells(*one) for one in found)]
    remarks = [f"**{agent.row.env}, {agent.row.entry}**: {text}" for agent, _ in found if (text := REMARKS.get(_key(agent)))]
    return "\n\n".join([TITLE, INTRO, markdown(lines), *([REMARKS_INTRO, bullets(remarks)] if remarks else [])]) + "\n"


def _key(agent: Scored) -> tuple[str, str, str]:
    return agent.name, agent.row.env, agent.row.entry


def _comparison(agent: Scored, published: float) -> str:
    return compare_with_published(agent.row.score, published)


def _cells(agent: Scored, published: dict[str, float]) -> list[str]:
    scores = agent.setting.scores(agent.study.metric)
    listed = ", ".join(f"{source}: {format_number(score)} {_comparison(agent, score)}" for source, score in published.items())
    seeds = f"{format_number(float(np.min(scores)))} to {format_number(float(np.max(scores)))}"
    score, change = estimate_text(agent.row.score), f"{_last_change(agent):+.3g}"
    return [agent.row.env, agent.row.entry, f"{agent.frames:,}", score, listed, seeds, change]


def _last_change(agent: Scored) -> float:
    """Return the change of the mean return in the last tenth of the frames."""
    mean = agent.setting.aligned_curves("current_return", "frame").mean()
    before, last = np.interp([0.9 * mean.frame[-1], mean.frame[-1]], mean.frame, mean.value)
    return float(last - before)


def unused_remarks(found: Sequence[tuple[Scored, dict[str, float]]]) -> set[tuple[str, str, str]]:
    """Return the keys of REMARKS that belong to none of the scores in `found`."""
    return REMARKS.keys() - {_key(agent) for agent, _ in found}
