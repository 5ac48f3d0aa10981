"""The shop for a WSGI server; it serves its static files too, so that nothing else is needed."""

import os

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "demo_project.settings")

application = StaticFilesHandler(get_wsgi_application())
