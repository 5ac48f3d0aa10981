"""What Django loads."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "demo_project.shop"
