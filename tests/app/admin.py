"""The admin of the models of the tests."""

from django.contrib import admin

from distlock_app.versioned_admin import VersionedAdmin, VersionedInlineMixin

from .models import Article, Extra, Leaflet, Note, Offer


class ExtraInline(VersionedInlineMixin, admin.TabularInline):
    model = Extra
    extra = 1


class NoteInline(admin.StackedInline):
    model = Note
    extra = 1


@admin.register(Offer)
class OfferAdmin(VersionedAdmin):
    fieldsets = [
        (None, {"fields": ["name", ("price", "kind"), "text"]}),
        ("More", {"fields": ["active", "starts", "ends", "account", "tags", "stock"]}),
    ]
    readonly_fields = ["stock"]


class OfferWithInlines(Offer):
    class Meta:
        app_label = "testapp"
        proxy = True


@admin.register(OfferWithInlines)
class OfferWithInlinesAdmin(VersionedAdmin):
    fields = ["name", "price"]
    inlines = [ExtraInline, NoteInline]


@admin.register(Article)
class ArticleAdmin(VersionedAdmin):
    list_display = ["revision", "text", "hidden"]
    list_editable = ["text", "hidden"]


@admin.register(Leaflet)
class LeafletAdmin(VersionedAdmin):
    list_display = ["pk", "title", "picture"]
    list_editable = ["title", "picture"]
