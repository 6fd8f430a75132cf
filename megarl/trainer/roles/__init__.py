"""Roles of a job: devices, worker groups, and engine replicas."""
