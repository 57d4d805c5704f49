{{/* Name of everything of this release: at most 50 characters, as suffixes follow. */}}
{{- define "omni.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-wide names also carry the namespace: two releases of one name may stand side by side. */}}
{{- define "omni.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "omni.name" .) -}}
{{- end -}}

{{- define "omni.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What is no operator has another name, or the operator's Service would select it. */}}
{{- define "omni.test.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omni.objectStore.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-object-store
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omni.release" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "omni.labels" -}}
{{ include "omni.selector" . }}
{{ include "omni.release" . }}
{{- end -}}

{{- define "omni.objectStore.labels" -}}
{{ include "omni.objectStore.selector" . }}
{{ include "omni.release" . }}
{{- end -}}

{{- define "omni.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "omni.name" .) -}}
{{- end -}}

{{- define "omni.objectStore" -}}
{{- include "omni.name" . }}-s3
{{- end -}}

{{- define "omni.objectStore.secret" -}}
{{- .Values.objectStore.secret | default (include "omni.objectStore" .) -}}
{{- end -}}

{{- define "omni.objectStore.url" -}}
http://{{ include "omni.objectStore" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:8333
{{- end -}}

{{- define "omni.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{/* The class that is created, else the one that is named, else nothing. */}}
{{- define "omni.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
{{- .Values.priorityClass.name | default (include "omni.clusterName" .) -}}
{{- else -}}
{{- .Values.priorityClass.name -}}
{{- end -}}
{{- end -}}

{{- define "omni.subject" -}}
kind: ServiceAccount
name: {{ include "omni.serviceAccount" . }}
namespace: {{ .Release.Namespace }}
{{- end -}}
