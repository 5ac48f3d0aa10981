"""The pages of the test project; a test that needs others names its own URLconf."""

from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
