"""Start the weights of a Session from those of another run (meta.init_from)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from slm_lab.experiment.files.find import find_weights
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.lib.log import notice


def init_weights(learners: Sequence[PolicyLearner], where: str, data_dir: Path) -> None:
    """Let these policies start from the weights and observation statistics of a checkpoint; notices list what is not used.

    Args: where: a checkpoint file, or a run folder, of which the best checkpoint is taken; see find.find_weights.

    Raises UserError if there is no such checkpoint, or if no weight matrix in it has the name and shape of one of the net.
    """
    path, saved = find_weights(where, data_dir)
    statistics = saved["normalizers"] if "normalizers" in saved else saved["env"]
    for learner in learners:
        own = learner.agent.weights()
        missing = learner.agent.take_weights(saved["weights"])
        if not any(value.dim() > 1 for name, value in own.items() if name not in missing):  # biases alone: it is another net
            matrices = {name: value for name, value in own.items() if value.dim() > 1}
            raise UserError(f"meta.init_from: no weight of {path} has the name and shape of one of this net: {_shapes(matrices)}")
        if missing:
            notice(f"meta.init_from: not in {path.name}, so initialised at random: {_shapes({name: own[name] for name in missing})}")
        if unused := {name: value for name, value in saved["weights"].items() if name not in own or name in missing}:
            notice(f"meta.init_from: not in this net, so not used: {_shapes(unused)}")
        if learner.agent.has_own_critics:
            notice("meta.init_from: the critics have a net of their own, which starts at random: checkpoints to play do not contain it")
        if not learner.normalizers.take_obs_statistics(statistics):
            notice(f"meta.init_from: the observation statistics of {path.name} do not fit; env.normalize_obs or the shape differs")


def _shapes(weights: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in weights.items())
