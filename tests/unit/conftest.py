"""The tests of this ring that use hypothesis are reproducible."""

from tests import seeds

seeds.load()
