"""Sources of experience: envs in this process, rollout workers, or recorded episodes."""
