"""Keys of a role's own devices; roles without them share the trainer's."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.keys import derived_key, key


@dataclass(frozen=True)
class OwnDevicesConfig:
    """Devices that no other role uses (a resource pool of the role)."""

    nnodes: int = key(
        0,
        "Nodes with devices of this role alone (its resource pool), where weights stay on the devices: "
        "`megatron.param_offload` has no effect. 0 = the role shares the trainer's devices. See "
        "docs/how_to/layouts.md.",
        at_least=0,
    )
    n_gpus_per_node: int | None = derived_key(
        "Devices of the role on each of `nnodes` nodes; auto = `trainer.n_gpus_per_node`.", at_least=1
    )

    @property
    def own_devices(self) -> int:
        """Devices of the role alone; 0 = the role shares the trainer's devices."""
        return self.nnodes * (self.n_gpus_per_node or 0)

    @property
    def device_groups(self) -> list[int]:
        """Sizes of the groups of devices that are reserved together, each on one node."""
        return [self.n_gpus_per_node or 1] * self.nnodes

    @property
    def required_groups(self) -> int | None:
        """Groups that the run needs to start; None = all."""
        return None
