"""Generate docs/BENCHMARKS.md: tables, figures and commands of the studies in tables.json, from the existing results."""

import csv
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from bench.peers import PEERS, peer_runs, with_peers
from bench.studies import DOCS, ROOT, STUDIES, missing_runs, results_of, study_of
from slm_lab.experiment.files.paths import file_stem
from slm_lab.experiment.report.compare_report import estimate_text, median_text
from slm_lab.experiment.report.figure import Figure
from slm_lab.experiment.report.metrics import Median, estimate_difference
from slm_lab.experiment.report.pairwise import PUBLISHED_SCORE, compare_pairs
from slm_lab.experiment.report.progress import format_number
from slm_lab.experiment.report.render_png import PNGRenderer
from slm_lab.experiment.report.setting import Setting, summarize
from slm_lab.experiment.report.study_report import (
    EntryResult,
    bullets,
    compare_with_published,
    explanations,
    study_figures,
    study_rows,
    study_settings,
    with_usable_metric,
)
from slm_lab.experiment.report.study_result import ResultRun
from slm_lab.spec.load.files import find_spec_file, raw_entries
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.load.study_file import settings_that_affect_results
from slm_lab.spec.models.study import StudyPlan, StudyRun

FIGURES = DOCS / "scores"
PUBLISHED = Path(__file__).with_name("published.csv")
"""Published scores in addition to those in the study files: section, env, entry, source, score, standard deviation, frames, seeds."""


_ADVANTAGE = "slm_lab minus this library"
"""Title of the column in which the scores of slm_lab and of another library are compared."""


class Section(NamedTuple):
    """A table of the page."""

    title: str
    study: str
    """Name of the study whose results the table contains."""
    text: str
    source: str = ""
    """Source of the published scores in the study, or "" if the study has none. The column of seconds contains the training time until the
    published score is reached. In the interquartile mean, scores are normalised so that the published score is 1."""


SECTIONS = (
    Section(
        "MuJoCo: PPO after 4 or 10 million frames",
        "mujoco",
        "The published scores are from SLM Lab v5, with the same frames and the same spacing of table rows. SLM Lab v5 used separate "
        "settings for some environments. Here, all environments share one spec, and the study changes a few of its values for Swimmer, "
        "HalfCheetah and Ant.",
        "SLM Lab v5",
    ),
    Section(
        "MuJoCo: PPO after 1 million frames",
        "mujoco_1m",
        "The runs of other libraries train the PPO of CleanRL and of Stable-Baselines3, with the defaults of these libraries and the same "
        "seeds, environments and frames. The published scores are for older versions of the environments (v3, v4); those of Tianshou are "
        "the largest mean return during training. The value of `log_std_init` is -1 in HalfCheetah and Ant, and 0 in Hopper and Walker2d. "
        "The seeds of this table had been trained before with 0, and some of them also with -0.5 and -1. Separate values are used because "
        "returns in Hopper and Walker2d were low with -1.",
    ),
    Section(
        "DeepMind Control: PPO",
        "dm_control_5m",
        "The environments are those of EnvPool. A return is the sum of rewards from 0 to 1 over the 1,000 steps of an episode. The "
        "published scores are from SLM Lab v5.3 after 100 million frames in MuJoCo Playground, and from single runs of rl_games after "
        "about 32 million frames. The keys `target_kl` and `stagger_episodes` were added to the spec because reported seeds had low "
        "returns in CartpoleBalance and CartpoleSwingup. The runs in these two environments were then repeated.",
        "SLM Lab (100 M frames)",
    ),
    Section(
        "DeepMind Control: PPO after 10 million frames",
        "dm_control_10m",
        "This table has six of the environments in which the scores after 5 million frames are below the published scores. They were "
        "chosen because the returns of their runs of 5 million frames still rise. Apart from the number of frames, the settings are those "
        "of the table above.",
        "SLM Lab (100 M frames)",
    ),
    Section(
        "MuJoCo Playground: PPO",
        "playground",
        "The environments are those of EnvPool, which use MuJoCo in C instead of MJX. The published scores are from SLM Lab v5.3 after "
        "100 million frames.",
        "SLM Lab (100 M frames)",
    ),
    Section(
        "MinAtar",
        "minatar",
        "The agents play version 0 of the games, in which all six actions are available, and the previous action is repeated with "
        "probability 0.1.",
    ),
    Section(
        "Off-policy algorithms after 100,000 frames of MuJoCo",
        "off_policy_100k",
        "The agents do one update per frame. An evaluation has 10 episodes with deterministic actions. The runs of other libraries train "
        "SAC and TD3 of Stable-Baselines3 and CrossQ of SBX, with the settings of RL Zoo and the same seeds. The published scores are "
        "results of the authors of SimbaV2 with version 4 of the environments and 10 seeds.",
        "SimbaV2's runs (v4)",
    ),
    Section(
        "Humanoid: asynchronous SAC",
        "async_sac_humanoid",
        "Two workers that train one net by Hogwild! are compared with SAC in one process with the same settings. Frames are counted "
        "over both workers. An evaluation has 10 episodes with deterministic actions.",
    ),
    Section(
        "Pong",
        "pong",
        "A frame is a step of the agent, which consists of four frames of the game.",
    ),
)
"""The tables, in the order of the page."""


class Scored(NamedTuple):
    """An agent in an env."""

    name: str
    """Name of the study."""
    study: StudyPlan
    row: EntryResult
    setting: Setting
    run: StudyRun | None
    """A run of the study; None for a run of another library."""
    reason: str
    """Why the row has a different metric than the study, or "" if the row has the metric of the study."""

    @property
    def anchor(self) -> str:
        return f"{self.name}-{file_stem(self.row.env)}".lower()

    @property
    def frames(self) -> int:
        return int(self.setting.runs[0].settings()["env.max_frame"])

    @property
    def results(self) -> list[ResultRun]:
        """The results of the agent in the env, in the order of their seeds."""
        return [run for run in self.setting.runs if isinstance(run, ResultRun)]


def scored(name: str) -> list[Scored]:
    """Return the agents and envs for which a study has results."""
    full_study = study_of(name)
    own_results = results_of(full_study, STUDIES[name].results)
    study, others = with_peers(full_study, STUDIES[name].results)
    of_key = study_settings(study, [*own_results, *others])
    study, reason = with_usable_metric(study, of_key)
    runs = {(run.env, run.entry): run for run in reversed(full_study.runs)}
    rows = study_rows(study, of_key)
    return [Scored(name, study, row, of_key[row.env, row.entry], runs.get((row.env, row.entry)), reason) for row in rows]


@cache
def published() -> list[dict[str, str]]:
    """Return the rows of published.csv."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sources(section: Section, agents: Sequence[Scored]) -> dict[str, dict[tuple[str, str], float]]:
    """Return source → (env, entry) → published score, for the envs and entries that have results."""
    columns: dict[str, dict[tuple[str, str], float]] = {}
    for agent in agents:
        key = agent.row.env, agent.row.entry
        if agent.row.published is not None:
            columns.setdefault(section.source, {})[key] = agent.row.published
        for line in published():
            if (line["section"], line["env"], line["entry"]) == (section.study, *key):
                columns.setdefault(line["source"], {})[key] = float(line["score"])
    return columns


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, whose header is the first line, without columns that are empty below the header."""
    head, *others = lines
    kept = [index for index in range(len(head)) if any(line[index] for line in others)]
    return "\n".join(f"| {' | '.join(cells[index] for index in kept)} |" for cells in (head, ["---"] * len(head), *others))


def table(section: Section, agents: Sequence[Scored]) -> str:
    """Return the table of a section."""
    columns = sources(section, agents)
    head = ["env", "algorithm", "frames", "seeds", "score", *columns, _ADVANTAGE, _seconds_title(section)]
    return markdown([head, *(_cells(section, agent, agents, columns) for agent in agents)])


def _seconds_title(section: Section) -> str:
    if level := _level(section):
        return f"seconds to {level}"
    return f"seconds to the score of {section.source}" if section.source else "seconds to solve"


def _level(section: Section) -> str | None:
    """Return the return that counts as solved in a section; None if its study does not define one."""
    solve = study_of(section.study).spec.solve
    return None if solve is None else format_number(solve)


def _cells(section: Section, agent: Scored, agents: Sequence[Scored], columns: Mapping[str, Mapping[tuple[str, str], float]]) -> list[str]:
    row = agent.row
    cells = [
        f"[{row.env}](#{agent.anchor})",
        f"[{row.entry}]({_spec_link(agent)})",
        f"{agent.frames:,}",
        str(row.seeds),
        estimate_text(row.score),
    ]
    for scores in columns.values():
        score = scores.get((row.env, row.entry))
        cells.append("" if score is None else f"{format_number(score)} {compare_with_published(row.score, score)}")
    seconds = seconds_to(agent, threshold(section, agent, columns))
    return [*cells, _advantage(agent, agents), "" if seconds is None else median_text(seconds)]


def threshold(section: Section, agent: Scored, columns: Mapping[str, Mapping[tuple[str, str], float]]) -> float | None:
    """Return the threshold for the column of seconds: the time until this return was reached is shown.

    The threshold is the published score of the section's source or, without such a score, the return that counts as solved.
    """
    score = columns.get(section.source, {}).get((agent.row.env, agent.row.entry))
    return agent.study.solve_score(agent.row.env) if score is None else score


def seconds_to(agent: Scored, threshold: float | None) -> Median | None:
    """Return the median time, in seconds, until an agent reached a return; None if there is no threshold."""
    metric = agent.study.metric
    return summarize(agent.setting, threshold, metric, agent.setting.all_seeds, metric).seconds_to_threshold


def _spec_link(agent: Scored) -> str:
    if agent.run is None:
        return "../bench/peers.py"
    return f"../{find_spec_file(spec_of(agent.study, agent.run)[0]).relative_to(ROOT)}"


def _advantage(agent: Scored, agents: Sequence[Scored]) -> str:
    """Return the difference between the score of the entry with which a peer is compared and the score of the peer."""
    of = next((beside.of for beside in PEERS.get(agent.name, ()) if beside.label == agent.row.entry), None)
    ours = next((other for other in agents if (other.row.env, other.row.entry) == (agent.row.env, of)), None)
    if ours is None:
        return ""
    values = [setting.scores(agent.study.metric).tolist() for setting in (ours.setting, agent.setting)]
    return estimate_text(estimate_difference(*values), "+")


def over_envs(section: Section, agents: Sequence[Scored]) -> str:
    """Return the interquartile means over all envs and a sentence about the scales; "" with fewer than two envs or without scales."""
    columns = sources(section, agents).get(section.source, {})
    ones = {env: max(score for (its, _), score in columns.items() if its == env) for env, _ in columns}
    together = [Setting(one.row.entry, one.setting.runs) for one in agents]
    if not together or (len({one.name for one in together}) == 1 and not all(one.row.env in ones for one in agents)):
        return ""
    overall = compare_pairs(together, agents[0].study.metric, ones)
    if not overall.overall:
        return ""
    lines = [["algorithm", "seeds", "interquartile mean over envs", "P(higher than the first)"]]
    lines += [
        [one.name, str(one.seeds), estimate_text(one.interquartile_mean), "" if one.improvement is None else estimate_text(one.improvement)]
        for one in overall.overall
    ]
    scales = Counter((scale.zero_is, scale.one_is) for scale in overall.scales)
    published = f"the score of {section.source}"
    meanings = {(zero, published if one == PUBLISHED_SCORE else one): count for (zero, one), count in scales.items()}
    parts = [f"{f'in {count} of them, ' if len(meanings) > 1 else ''}0 is {zero} and 1 is {one}" for (zero, one), count in meanings.items()]
    return f"{markdown(lines)}\n\nThe scores in each of the {len(overall.scales)} envs are normalised linearly: {'; '.join(parts)}."


# ---- commands


def spec_of(study: StudyPlan, run: StudyRun) -> tuple[str, str]:
    """Return the file and the name of the spec of a run."""
    entries = [entry for entry in study.spec.entries if entry.title == run.entry]
    entry = next((candidate for candidate in entries if candidate.env in (None, run.env)), entries[0])
    file, _, name = entry.spec.rpartition(":")
    return file, name


def command(study: StudyPlan, run: StudyRun) -> list[str]:
    """Return the words of the command that trains only this run of a study: its spec, its seed, and each value that the study changes."""
    file, name = spec_of(study, run)
    raw = json.dumps(raw_entries(find_spec_file(file))[1][name])
    variable = [f"env={run.spec.env.name}"] if "${env}" in raw else []
    before = settings_that_affect_results(load_spec(file, name, variable))
    after = dict(run.settings)
    changed = [path for path in [*after, *(path for path in before if path not in after)] if before.get(path) != after.get(path)]
    sets = [*variable, *(f"{path}={_value(after.get(path))}" for path in changed)]
    return ["slm-lab", file, name, "train", "--seed", str(run.random_seed), *(word for setting in sets for word in ("-s", setting))]


def _value(value: object) -> str:
    """Return a value in the format of --set: text has no quotes if it is read as the same text without them."""
    return value if isinstance(value, str) else json.dumps(value)


def _command_of(agent: Scored) -> str:
    seeds = ", ".join(str(run.random_seed) for run in agent.results)
    if agent.run is None:
        return f"# {agent.row.entry}; random_seed: {seeds}\npython -m bench.peers {agent.name}"
    words = command(agent.study, agent.run)
    return f"# {agent.row.entry}; random_seed: {seeds}\n{shlex.join(words)}"


# ---- the page


def section_text(section: Section) -> str:
    """Return the text of a section. The text of a section without results has one line."""
    agents, name = scored(section.study), section.study
    if not agents:
        return f"## {section.title}\n\nThere are no results yet. To train the runs, use `make benchmarks NAME={name}`.\n"
    parts = [f"## {section.title}", fill(section.text, 140), _left(section), table(section, agents), explained(section, agents)]
    results = [run for agent in agents for run in agent.results]
    parts += [over_envs(section, agents), training_facts(results)]
    parts += [f"`make benchmarks NAME={name}` trains the missing runs. To repeat a run, use its command below.", *_blocks(agents)]
    return "\n\n".join(part for part in parts if part) + "\n"


def explained(section: Section, agents: Sequence[Scored]) -> str:
    """Return a list that explains the columns and the links of the table of a section."""
    columns = ["score", *(["published"] if sources(section, agents) else [])]
    reasons = dict.fromkeys(agent.reason for agent in agents if agent.reason)
    texts = [
        *reasons,
        "Each env links to its figure and commands, and each algorithm links to its spec.",
        *explanations(agents[0].study, columns),
    ]
    if any(_advantage(agent, agents) for agent in agents):
        texts.append(
            f'The column "{_ADVANTAGE}" has the score of the same algorithm in slm_lab minus the score of the other library, with Welch\'s '
            "95 % confidence interval."
        )
    if section.source or _level(section):
        texts.append(
            f'The column "{_seconds_title(section)}" has the median over the seeds of the training time until this return was reached. The '
            "times were measured on the processors named below, on which other programs may have run at the same time. ∞ means that at "
            "least half of the seeds did not reach the return."
        )
    return bullets(texts)


def _left(section: Section) -> str:
    """Return sentences about the runs that have no result yet, including those of other libraries; "" if there are none."""
    study, folder = study_of(section.study), STUDIES[section.study].results
    missing, peers = len(missing_runs(study, folder)), [run.file.is_file() for run in peer_runs(study, folder)]
    sentences = [f"{missing} of {len(study.runs)} runs are not trained yet."] if missing else []
    if not all(peers):
        sentences.append(f"{peers.count(False)} of {len(peers)} runs of other libraries are not trained yet.")
    return " ".join(sentences)


def training_facts(results: Sequence[ResultRun]) -> str:
    """Return sentences about the processors, the versions of slm_lab and the training time of runs."""
    processors = [str(run.content.get("processor") or "an unknown processor") for run in results]
    found = [(run.content.get("versions") or {}).get("slm_lab") for run in results]
    versions = ["other libraries" if version is None else f"slm_lab {version}" for version in found]
    time = _duration(sum(map(_seconds, results)))
    subject = "this run" if len(results) == 1 else f"these {len(results)} runs"
    return (
        f"Training {subject} took {time}, on {_counted(processors)}, with {_counted(sorted(versions))}. Other programs may have used the "
        "processor at the same time."
    )


def _counted(names: Iterable[str]) -> str:
    """Return the different names, each with its number of runs if there are several."""
    counts = Counter(names)
    listed = [f"{name} ({count} {'run' if count == 1 else 'runs'})" for name, count in counts.items()] if len(counts) > 1 else [*counts]
    return " and ".join(filter(None, [", ".join(listed[:-1]), listed[-1]]))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _seconds(run: ResultRun) -> float:
    """Return the training time of a run. If the run was continued, the time is that of the Session that trained for the longest time."""
    if (seconds := run.content["seconds"]) is not None:
        return float(seconds)
    return max(float(table["wall_t"][-1]) for table in run.tables("train").values())


def _blocks(agents: Sequence[Scored]) -> Iterator[str]:
    """Yield, for each env, its figures and the commands of its agents."""
    for anchor in dict.fromkeys(agent.anchor for agent in agents):
        env_agents = [agent for agent in agents if agent.anchor == anchor]
        env = env_agents[0].row.env
        images = "\n".join(f"![Return, {env}](scores/{name}.png)" for name in figures_of(env_agents))
        commands = "\n".join(map(_command_of, env_agents))
        yield f'<a id="{anchor}"></a>\n**{env}**\n\n{images}\n\n```bash\n{commands}\n```'


def figures_of(env_agents: Sequence[Scored]) -> dict[str, Figure]:
    """Return file name → figure with the curves of an env, for each axis of its study."""
    agent = env_agents[0]
    drawn = study_figures(agent.study, {(agent.row.env, each.row.entry): each.setting for each in env_agents})
    suffix = f"_{file_stem(agent.row.env)}" if len(agent.study.envs) > 1 else ""
    wanted = {name: figure for name, figure in drawn.items() if name.startswith("returns_vs_") and name.endswith(suffix)}
    return {f"{agent.name}_{name.removeprefix('returns_vs_')}": figure for name, figure in wanted.items()}


def tables_text() -> str:
    """Return the part of the page below the scores of the classic environments."""
    return "\n".join(map(section_text, SECTIONS))


def write_figures(name: str) -> None:
    """Write the figures of a study."""
    renderer, agents = PNGRenderer(), scored(name)
    FIGURES.mkdir(exist_ok=True)
    for anchor in dict.fromkeys(agent.anchor for agent in agents):
        for file, figure in figures_of([agent for agent in agents if agent.anchor == anchor]).items():
            (FIGURES / f"{file}.png").write_bytes(renderer.render(figure))
