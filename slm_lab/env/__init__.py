"""Vector envs: one record per step, whatever steps them."""

from slm_lab.env.make import BACKENDS, make_env
from slm_lab.env.vec import Env

__all__ = ["BACKENDS", "Env", "make_env"]
