"""Sources of experience: envs in this process, or rollout workers."""
