"""Vector envs with one interface for all backends."""

from slm_lab.env.backend import Backend, EnvRequest, RawStep
from slm_lab.env.make import BACKENDS, make_env
from slm_lab.env.normalize import Normalizers, make_normalizers
from slm_lab.env.outcome import InvalidOutcome, InvalidReward
from slm_lab.env.vec import Env

__all__ = [
    "BACKENDS",
    "Backend",
    "Env",
    "EnvRequest",
    "InvalidOutcome",
    "InvalidReward",
    "Normalizers",
    "RawStep",
    "make_env",
    "make_normalizers",
]
