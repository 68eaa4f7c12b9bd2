"""Rates of devices and links, at the place that pages and programs of users name."""

from attnmesh.mesh.rates import NO_LINK as NO_LINK
from attnmesh.mesh.rates import Device as Device
from attnmesh.mesh.rates import Link as Link
