"""Rates of devices and links, as pages and programs of users import them."""

from attnmesh.cost.rates import NO_LINK as NO_LINK
from attnmesh.cost.rates import Device as Device
from attnmesh.cost.rates import Link as Link
