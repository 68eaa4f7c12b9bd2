"""Rates of devices and links, as pages and programs of users import them."""

from attnmesh.mesh.rates import NO_LINK as NO_LINK
from attnmesh.mesh.rates import Device as Device
from attnmesh.mesh.rates import Link as Link
