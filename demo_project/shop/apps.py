"""What Django loads."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class ShopConfig(AppConfig):
    name = "demo_project.shop"
    verbose_name = _("Shop")
